"""Stock DCP on the other side of an object store, and servers that can only be read from."""

from __future__ import annotations

import functools
import http.server
import threading
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from _places import Place, policy, s3_place
from _s3_server import S3Server
from keywords import for_load, for_save
from states import assert_same
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import sidestream
from sidestream import errors


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "large": torch.randn(3 << 19),
        "bf16": torch.randn(200, 300).bfloat16(),
        "nested": {"small": torch.arange(5), "deep": {"scalar": torch.tensor(2.5)}},
        "step": 7,
        "name": "run",
    }


def blank() -> dict[str, Any]:
    return {
        "large": torch.zeros(3 << 19),
        "bf16": torch.zeros(200, 300).bfloat16(),
        "nested": {"small": torch.zeros(5, dtype=torch.int64), "deep": {"scalar": torch.tensor(0.0)}},
        "step": 0,
        "name": "",
    }


@pytest.fixture(params=["memory", "s3 by obstore", "s3 by fsspec"])
def place(request: pytest.FixtureRequest, s3: S3Server) -> Place:
    if request.param == "memory":
        return Place(f"memory://{uuid.uuid4().hex}/run")
    return s3_place(s3, request.param.rpartition(" ")[2])


def stock_options(place: Place) -> dict[str, Any]:
    return dict(place.keywords["storage"].options) if place.keywords else {}


async def test_stock_dcp_reads_what_we_wrote(place: Place) -> None:
    await sidestream.save(state(), place.url(), **for_save(**place.keywords))
    target = blank()
    dcp.load(target, storage_reader=FsspecReader(place.url(), **stock_options(place)), no_dist=True)
    assert_same(state(), target)


async def test_we_read_what_stock_dcp_wrote(place: Place) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        dcp.save(state(), storage_writer=FsspecWriter(place.url(), **stock_options(place)), no_dist=True)
    target = blank()
    report = await sidestream.load(target, place.url(), **for_load(**place.keywords))
    assert_same(state(), target)
    assert report.unverified == ()
    with pytest.raises(errors.CheckpointExistsError):
        await sidestream.save(state(), place.url(), **for_save(**place.keywords))


# --- http -----------------------------------------------------------------------------------------------------------


class _Ranges(http.server.SimpleHTTPRequestHandler):
    """Files with ranges and without listings, as web servers give them."""

    protocol_version = "HTTP/1.1"
    downloads: ClassVar[list[str]] = []
    """The names of the files of which something was read, in this process."""

    def log_message(self, *arguments: object) -> None:
        pass

    def do_GET(self) -> None:
        self.downloads.append(Path(self.path).name)
        super().do_GET()

    def list_directory(self, path: Any) -> None:
        self.send_error(403)

    def send_head(self) -> Any:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return None
        content = path.read_bytes()
        asked = self.headers.get("Range")
        status, piece = 200, content
        if asked and asked.startswith("bytes="):
            start, _, end = asked.removeprefix("bytes=").partition("-")
            first = int(start) if start else max(0, len(content) - int(end))
            last = int(end) + 1 if start and end else len(content)
            status, piece = 206, content[first:last]
        self.send_response(status)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(piece)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(piece) - 1}/{len(content)}")
        self.end_headers()
        import io

        return io.BytesIO(piece)


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(_Ranges, directory=str(tmp_path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


async def test_web_servers_are_read_from(web: str, tmp_path: Path) -> None:
    await sidestream.save(state(), tmp_path / "run" / "ckpt")
    target = blank()
    await sidestream.load(target, f"{web}/run/ckpt")
    assert_same(state(), target)
    _Ranges.downloads.clear()
    opened = await sidestream.open_checkpoint(f"{web}/run/ckpt")
    assert [name.startswith("manifest-") for name in _Ranges.downloads].count(True) == 1
    assert torch.equal(await opened.tensor("bf16", slice(3, 9)), state()["bf16"][3:9])
    with pytest.raises(errors.CheckpointNotFoundError):
        await sidestream.load(blank(), f"{web}/run/other")
    with pytest.raises(errors.InvalidOptionError, match="not written"):
        await sidestream.save(state(), f"{web}/run/new")


async def test_web_servers_name_no_files_of_others(web: str, tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.raises(errors.UnsupportedCheckpointError, match="listings"):
        await sidestream.load(blank(), f"{web}/stock")


# --- the cache ------------------------------------------------------------------------------------------------------


async def test_readers_may_keep_files(s3: S3Server, tmp_path: Path) -> None:
    place = s3_place(s3, "auto")
    await sidestream.save(state(), place.url(), **for_save(**place.keywords))
    cached = {
        **place.keywords,
        "storage": sidestream.Storage(stock_options(place), policy=policy(cache_dir=str(tmp_path / "cache"))),
    }
    for expected in (True, False):
        s3.log.clear()
        target = blank()
        await sidestream.load(target, place.url(), **for_load(**cached))
        assert_same(state(), target)
        fetched = [one.key for one in s3.log if one.kind == "get" and one.key.endswith(".distcp")]
        assert bool(fetched) is expected
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.endswith(".partial")]


async def test_a_file_system_that_only_looks_first(tmp_path: Path) -> None:
    """Its creations are not exclusive, and that is told: once, as a warning and as an event."""
    from sidestream import events
    from sidestream._storage.object_store import transaction as objects

    objects._warned.clear()
    seen: list[events.Event] = []
    filesystem = fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file"))
    with events.observe(seen.append):
        for name in ("one", "two"):
            await sidestream.save(state(), f"run/{name}", storage=sidestream.Storage(filesystem=filesystem))
    lost = [one for one in seen if isinstance(one, events.GuaranteeLost)]
    assert len(lost) == 1
    assert "conditional" in lost[0].promise
    target = blank()
    await sidestream.load(target, tmp_path / "run" / "two")
    assert_same(state(), target)
