"""Options as fsspec users write them, for both clients; and that nothing of them is ever to be seen."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest
import torch
from _places import policy, s3_place
from _s3_server import KEY, SECRET, S3Server
from keywords import for_load, for_save

import sidestream
from sidestream import errors, events
from sidestream._storage import locate_directory, locate_run
from sidestream._storage.clients.credentials import Unmapped, client_for
from sidestream.errors import redacted


def test_s3_options_of_both_worlds() -> None:
    client = client_for(
        "s3",
        "bucket",
        {
            "key": "k",
            "secret": "s",
            "token": "t",
            "client_kwargs": {"region_name": "eu-west-1", "endpoint_url": "https://s3.example"},
            "config_kwargs": {"s3": {"addressing_style": "path"}, "read_timeout": 3},
            "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "id"},
            "requester_pays": True,
            "use_listings_cache": False,
        },
    )
    assert dict(client.config) == {
        "access_key_id": "k",
        "secret_access_key": "s",
        "session_token": "t",
        "region": "eu-west-1",
        "endpoint": "https://s3.example",
        "server_side_encryption": "aws:kms",
        "sse_kms_key_id": "id",
        "request_payer": "requester",
        "virtual_hosted_style_request": False,
        "checksum_algorithm": "crc64nvme",
        "unsigned_payload": True,
    }
    anonymous = client_for("s3", "bucket", {"anon": True, "endpoint_url": "http://192.0.2.1:9000"})
    assert anonymous.config["skip_signature"] is True
    assert anonymous.config["unsigned_payload"] is False  # in the open only the signature covers the payload
    assert anonymous.client_options == {"allow_http": True}


def test_other_clouds() -> None:
    azure = client_for(
        "az", "box", {"connection_string": "AccountName=a;AccountKey=k==;BlobEndpoint=http://127.0.0.1/a"}
    )
    assert azure.bucket == "box"
    assert dict(azure.config) == {"account_name": "a", "account_key": "k==", "endpoint": "http://127.0.0.1/a"}
    assert client_for("abfss", "box@acc.dfs.core.windows.net", {}).config["account_name"] == "acc"
    assert client_for("gs", "bucket", {"token": "anon", "project": "p"}).config == {"skip_signature": True}


@pytest.mark.parametrize(
    ("protocol", "options", "names"),
    [
        ("s3", {"version_aware": True}, ("version_aware",)),
        ("s3", {"s3_additional_kwargs": {"ACL": "public-read"}}, ("ACL",)),
        ("s3", {"client_kwargs": {"verify": "/ca.pem"}}, ("verify",)),
        ("gs", {"token": "browser"}, ("token",)),
        ("gs", {"endpoint_url": "http://127.0.0.1"}, ("endpoint_url",)),
        ("az", {"credential": object()}, ("credential",)),
    ],
)
def test_what_only_fsspec_understands(protocol: str, options: dict[str, Any], names: tuple[str, ...]) -> None:
    with pytest.raises(Unmapped) as caught:
        client_for(protocol, "bucket", options)
    assert caught.value.names == names
    with pytest.raises(errors.InvalidOptionError, match=names[0]):
        locate_run(f"{protocol}://bucket/run", sidestream.Storage(options, policy=policy("obstore")))


def test_profiles(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the files of the AWS tools reaches obstore, too."""
    (tmp_path / "credentials").write_text("[there]\naws_access_key_id = k\naws_secret_access_key = s\n")
    (tmp_path / "config").write_text("[profile there]\nregion = eu-west-3\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    client = client_for("s3", "bucket", {"profile": "there"}).complete()
    assert client.config["region"] == "eu-west-3"
    assert client.provider is not None
    given = client.provider()
    assert (given["access_key_id"], given["secret_access_key"]) == ("k", "s")


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
async def test_no_secret_is_ever_shown(
    s3: S3Server, engine: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    place = s3_place(s3, engine, retries=1)
    caplog.set_level(logging.DEBUG, logger="sidestream")
    state = {"large": torch.ones(3 << 20), "step": 7}
    seen: list[str] = []
    with events.observe(lambda event: seen.append(repr(event))):
        info = await sidestream.save(state, place.url(), **for_save(**place.keywords))
        opened = await sidestream.open_checkpoint(place.url(), **place.keywords)
        seen += [repr(info), repr(opened), repr(place.keywords["storage"])]
        for kind, fault in (("get", 500), ("get", 403), ("get", "reset"), ("list", 503)):
            s3.always(kind, fault)
            with pytest.raises((errors.SidestreamError, OSError)) as caught:
                await sidestream.load({"step": 0}, place.url(), **for_load(timeout_s=1.0, **place.keywords))
            error: BaseException | None = caught.value
            seen += [repr(error), str(error), *map(str, getattr(error, "__notes__", ()))]
    storage = place.keywords["storage"]
    location = locate_directory(place.url(), storage)
    engine_object = vars(location.store)["_bucket"].engine
    seen += [repr(storage), repr(location), repr(location.store), repr(engine_object), repr(vars(location.store))]
    for one in (storage, location.store, engine_object):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(one)
    told = capfd.readouterr()
    texts = [*seen, caplog.text, told.out, told.err]
    assert not [text for text in texts if SECRET in text or KEY in text]
    assert not [name for name, content in s3.objects.items() if SECRET.encode() in content or KEY.encode() in content]


def test_urls_are_redacted() -> None:
    assert redacted("GET https://u:p@host/key?sig=abc&se=1 failed") == "GET https://host/key failed"
    assert redacted("s3://user:secret@bucket/run") == "s3://bucket/run"


@pytest.mark.parametrize("part", ["a.", "a://", "s3://b?", "s3://b@"])
def test_redacting_takes_time_in_proportion_to_the_text(part: str) -> None:
    """Messages may hold names of any length from a checkpoint. A pattern that looks back takes minutes for these."""
    assert redacted(part * 500_000 + " s3://u:p@host").endswith(" s3://host")


@pytest.mark.parametrize(
    "keywords",
    [
        {"storage_options": {"key": "k"}, "storage": sidestream.Storage()},
        {"storage_options": "key=k"},
        {"storage": {"key": "k"}},
        {"storage": sidestream.Storage},
    ],
)
async def test_options_that_are_none(keywords: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidOptionError, match="storage"):
        await sidestream.save({"step": 1}, "memory://none/ckpt", **for_save(**keywords))
    with pytest.raises(errors.InvalidOptionError, match="target_storage"):
        words = {f"target_{name}": value for name, value in keywords.items()}
        await sidestream.copy("memory://none/ckpt", "memory://none/copy", **words)
    with pytest.raises(errors.InvalidOptionError, match="storage"):
        sidestream.HF("memory://none/export", **keywords)


@pytest.mark.parametrize(
    "keywords",
    [
        {"options": {"key": "k"}, "filesystem": __import__("fsspec").filesystem("memory")},
        {"options": "key=k"},
        {"filesystem": "s3"},
        {"filesystem": __import__("fsspec").filesystem},
        {"policy": {"engine": "obstore"}},
        {"commit": "link"},
    ],
)
def test_storages_that_are_none(keywords: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidOptionError, match=next(reversed(keywords))):
        sidestream.Storage(**keywords)


def test_a_storage_shows_and_pickles_no_credentials() -> None:
    of_options = sidestream.Storage({"key": KEY, "secret": SECRET}, policy=sidestream.StorePolicy(retries=1))
    of_object = sidestream.Storage(filesystem=__import__("fsspec").filesystem("memory", skip_instance_cache=True))
    assert SECRET not in repr(of_options)
    assert KEY not in repr(of_options)
    assert "retries=1" in repr(of_options)
    assert "MemoryFileSystem" in repr(of_object)
    for one in (of_options, of_object):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(one)


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "boto"},
        {"request_timeout_s": 0},
        {"retries": -1},
        {"concurrency": 0},
        {"part_bytes": 1 << 20},
    ],
)
def test_policies_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidOptionError):
        sidestream.StorePolicy(**options)
