"""The harness itself: the servers are what they are taken for, and the proxy breaks what it says it breaks."""

from __future__ import annotations

import base64
import hashlib
import http.client
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _proxy import FAULTS, REFUSALS, Lane
from _servers import BUCKET, LOCAL, Bucket, Endpoint, s3_client


def listening(pid: int) -> set[str]:
    """The addresses, in the kernel's own notation, that a process and its threads listen on."""
    sockets = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


@pytest.mark.parametrize("name", ["seaweed", "azure", "gcs"])
def test_a_server_listens_on_loopback_alone(name: str, request: pytest.FixtureRequest) -> None:
    endpoint: Endpoint = request.getfixturevalue(name)
    assert listening(endpoint.pid) == {"0100007F"}


def test_seaweedfs_checks_what_s3_checks(seaweed: Endpoint, prefix: str) -> None:
    from botocore.exceptions import ClientError

    client = s3_client(seaweed)

    def refused(**what: object) -> str:
        with pytest.raises(ClientError) as caught:
            client.put_object(Bucket=BUCKET, Key=prefix, **what)
        return caught.value.response["Error"]["Code"]

    client.put_object(Bucket=BUCKET, Key=prefix, Body=b"one")
    assert refused(Body=b"two", IfNoneMatch="*") == "PreconditionFailed"
    assert refused(Body=b"two", ChecksumCRC32="AAAAAA==") in ("BadDigest", "InvalidRequest")
    assert client.get_object(Bucket=BUCKET, Key=prefix)["Body"].read() == b"one"
    client.close()
    stranger = s3_client(Endpoint("s3", seaweed.port, {**seaweed.options, "secret": "another"}))
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        stranger.get_object(Bucket=BUCKET, Key=prefix)
    stranger.close()


@contextmanager
def client(lane: Lane, timeout_s: float) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(LOCAL, lane.port, timeout=timeout_s)
    try:
        yield connection
    finally:
        connection.close()


def presigned(seaweed: Endpoint, lane: Lane, key: str, method: str, **also: str) -> str:
    """The path of a signed request through the proxy."""
    through = Endpoint("s3", lane.port, {**seaweed.options, "endpoint_url": f"http://{LOCAL}:{lane.port}"})
    signer = s3_client(through)
    url = signer.generate_presigned_url(method, Params={"Bucket": BUCKET, "Key": key, **also}, ExpiresIn=600)
    signer.close()
    return url.partition(str(lane.port))[2]


def test_without_a_fault_the_proxy_only_counts(seaweed: Endpoint, lane: Lane, prefix: str) -> None:
    content = bytes(range(256)) * 4096
    with client(lane, 60) as connection:
        connection.request("PUT", presigned(seaweed, lane, prefix, "put_object"), content)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
        connection.request("GET", presigned(seaweed, lane, prefix, "get_object"), headers={"Range": "bytes=256-511"})
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (206, bytes(range(256)))
    first, second = lane.log
    assert (first.operation, first.sent, first.received, first.status) == ("PutObject", len(content), 0, 200)
    assert (second.operation, second.sent, second.received, second.status) == ("GetObject", 0, 256, 206)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_what_its_name_says(seaweed: Endpoint, lane: Lane, bucket: Bucket, prefix: str, fault: str) -> None:
    content = b"x" * 300_000
    lane.break_at(1, fault)
    arrived, failure = b"", None
    # Without a checksum SeaweedFS keeps what had come of a request that was cut off, as if that were all.
    md5 = base64.b64encode(hashlib.md5(content).digest()).decode()
    stalls = "stall" in fault or fault == "trickle"
    done = fault.startswith("lost") or "answer" in fault or fault in ("truncated", "trickle")
    with client(lane, 1 if stalls and not done else 60) as connection:
        try:
            path = presigned(seaweed, lane, prefix, "put_object", ContentMD5=md5)
            connection.request("PUT", path, content, {"Content-MD5": md5})
            if stalls and done:  # only then is there nothing to wait for any more
                wait_until(lambda: bucket.keys(prefix))
                connection.sock.settimeout(0.3)
            answer = connection.getresponse()
            arrived = str(answer.status).encode() + answer.read()
        except (OSError, http.client.HTTPException) as error:
            failure = error
    if fault in REFUSALS:
        assert arrived.startswith({"slow-down": b"503", "lost-500": b"500"}.get(fault, fault.encode()))
    elif stalls:
        assert isinstance(failure, socket.timeout)
    elif fault == "truncated":
        assert arrived == b"200" or isinstance(failure, http.client.HTTPException)  # cut in the middle of the head
    else:
        assert isinstance(failure, (ConnectionResetError, BrokenPipeError)), failure
    assert bucket.keys(prefix) == ({prefix: len(content)} if done else {})


def wait_until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)
