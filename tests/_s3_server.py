"""A small S3 server in the process of the test, which can be told to misbehave at any request.

It keeps what clients rely on: conditional puts, multipart uploads that are invisible until they are completed, ranges,
listings. It checks the access key and no signature.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import md5
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

__all__ = ["KEY", "SECRET", "Request", "S3Server", "serving"]

KEY, SECRET = "AKIACANARY00000000", "canary-secret-0123456789abcdef"

Fault = int | str | Callable[[], object]
"""What is called before the request is carried out, or a status to answer with; ``"reset"`` before anything was read,
``"stall"`` for ever, ``"lose"`` the answer after the work was done, ``"stall-after"`` it was done, ``"truncate"`` the
body of the answer, ``"stall-midway"`` in the middle of it."""


@dataclass(frozen=True)
class Request:
    """``kind``: put, create, replace, part, begin, complete, abort, get, head, list, delete."""

    kind: str
    key: str
    nbytes: int = 0
    asked: tuple[int, int] | None = None
    keys: tuple[str, ...] = ()
    """What a ``delete_many`` names."""


@dataclass
class Upload:
    key: str
    parts: dict[int, bytes] = field(default_factory=dict)


class S3Server:
    """One bucket at ``endpoint``; ``reset`` gives it a new name, and whoever is late finds the old one no more."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closing = threading.Event()
        self.reset()
        self.seen = threading.Condition(self.lock)
        handler = type("Handler", (_Handler,), {"s3": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def reset(self) -> None:
        with self.lock:
            self.closing.set()
            self.closing = threading.Event()
            self.bucket = f"bucket-{uuid.uuid4().hex[:12]}"
            self.objects: dict[str, bytes] = {}
            self.modified: dict[str, datetime] = {}
            self.uploads: dict[str, Upload] = {}
            self.log: list[Request] = []
            self.ignores_conditions = False  # of ``If-Match``
            self.fault: Callable[[Request], Fault | None] = lambda request: None

    @property
    def options(self) -> dict[str, object]:
        """``storage_options`` as s3fs takes them."""
        return {
            "key": KEY,
            "secret": SECRET,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    def once(self, kind: str, fault: Fault, key: str = "", times: int = 1) -> None:
        """At the next ``times`` requests of that kind whose key contains ``key``."""
        left = [times]

        def choose(request: Request) -> Fault | None:
            if request.kind == kind and key in request.key and left[0]:
                left[0] -= 1
                return fault
            return None

        self.fault = choose

    def always(self, kind: str, fault: Fault, key: str = "") -> None:
        self.fault = lambda request: fault if request.kind == kind and key in request.key else None

    def count(self, kind: str) -> int:
        with self.lock:
            return sum(1 for one in self.log if one.kind == kind)

    def wait_for(self, kind: str, times: int = 1) -> None:
        """Until so many requests of that kind have come."""
        with self.seen:
            assert self.seen.wait_for(lambda: sum(1 for one in self.log if one.kind == kind) >= times, 60)

    def close(self) -> None:
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def serving() -> Iterator[S3Server]:
    server = S3Server()
    try:
        yield server
    finally:
        server.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    s3: S3Server

    def log_message(self, *arguments: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(120)

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        kind = self._kind(key, query)
        key = key or query.get("prefix", "")
        length = int(self.headers.get("Content-Length") or 0)
        named = self._body(length) if kind == "delete_many" else b""
        request = Request(kind, key, length, self._asked(), _keys(named) if named else ())
        with self.s3.seen:
            closing = self.s3.closing
            if bucket != self.s3.bucket:
                return self._hang_up()
            self.s3.log.append(request)
            fault = self.s3.fault(request)
            self.s3.seen.notify_all()
        if callable(fault):
            fault()
        if fault == "reset":
            return self._hang_up()
        if fault == "stall":
            closing.wait(600)
            return self._hang_up()
        body = named or self._body(length)
        if body is None:  # the client has closed the connection: a server stores no object that is not whole
            return self._hang_up()
        if isinstance(fault, int):
            code = {400: "RequestTimeout", 404: "NoSuchBucket", 503: "SlowDown", 409: "ConditionalRequestConflict"}.get(
                fault, "InternalError"
            )
            return self._answer(fault, f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode())
        if KEY not in self.headers.get("Authorization", ""):
            return self._answer(403, b"<Error><Code>AccessDeniedError</Code><Message>who are you</Message></Error>")
        with self.s3.lock:
            if bucket != self.s3.bucket:
                return self._hang_up()
            status, content, headers = getattr(self, f"_{kind}")(key, query, body)
        if fault == "stall-after":
            closing.wait(600)
        if fault in ("lose", "stall-after"):
            return self._hang_up()
        return self._answer(
            status, content, headers, cut=fault in ("truncate", "stall-midway"), stall=fault == "stall-midway"
        )

    def _kind(self, key: str, query: dict[str, str]) -> str:
        verb = self.command
        if verb == "PUT":
            if self.headers.get("If-Match"):
                return "replace"
            return "part" if "uploadId" in query else "create" if self.headers.get("If-None-Match") else "put"
        if verb == "POST":
            return "begin" if "uploads" in query else "complete" if "uploadId" in query else "delete_many"
        if verb == "DELETE":
            return "abort" if "uploadId" in query else "delete"
        if verb == "HEAD":
            return "head"
        return "get" if key else "list"

    def _asked(self) -> tuple[int, int] | None:
        value = self.headers.get("Range")
        if not value:
            return None
        start, _, end = value.removeprefix("bytes=").partition("-")
        return (-int(end), 0) if not start else (int(start), int(end) + 1 if end else 1 << 62)

    def _body(self, length: int) -> bytes | None:
        try:
            raw = self.rfile.read(length)
        except ConnectionError:
            return None
        if len(raw) < length:
            return None
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return raw
        content = b""
        while raw:
            head, _, raw = raw.partition(b"\r\n")
            size = int(head.split(b";")[0], 16)
            content, raw = content + raw[:size], raw[size + 2 :]
            if not size:
                break
        return content

    def _hang_up(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(2)

    def _answer(
        self,
        status: int,
        content: bytes,
        headers: dict[str, str] | None = None,
        *,
        cut: bool = False,
        stall: bool = False,
    ) -> None:
        headers = {"Content-Length": str(len(content)), **(headers or {})}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if stall:
            self.wfile.flush()
            self.s3.closing.wait(600)
        if cut:
            self._hang_up()

    # --- each returns status, body and headers ---

    def _put(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        source = unquote(self.headers.get("x-amz-copy-source", "")).lstrip("/").partition("/")[2]
        self.s3.objects[key] = self.s3.objects[source] if source else body
        self.s3.modified[key] = datetime.now(UTC)
        copied = _xml("CopyObjectResult", f"<ETag>x</ETag><LastModified>{_iso(self.s3.modified[key])}</LastModified>")
        return 200, copied if source else b"", {"ETag": _etag(self.s3.objects[key])}

    def _create(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if key in self.s3.objects:
            return 412, b"<Error><Code>PreconditionFailed</Code><Message>it is there</Message></Error>", {}
        return self._put(key, query, body)

    def _replace(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        if self.s3.ignores_conditions:
            return self._put(key, query, body)
        if key not in self.s3.objects:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>", {}
        if self.headers["If-Match"] != _etag(self.s3.objects[key]):
            return 412, b"<Error><Code>PreconditionFailed</Code><Message>it has changed</Message></Error>", {}
        return self._put(key, query, body)

    def _begin(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        upload_id = f"upload-{time.monotonic_ns():x}"
        self.s3.uploads[upload_id] = Upload(key)
        return (
            200,
            _xml("InitiateMultipartUploadResult", f"<Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId>"),
            {},
        )

    def _part(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        upload = self.s3.uploads.get(query["uploadId"])
        if upload is None:
            return 404, b"<Error><Code>NoSuchUpload</Code><Message>no such upload</Message></Error>", {}
        upload.parts[int(query["partNumber"])] = body
        return 200, b"", {"ETag": f'"part{query["partNumber"]}"'}

    def _complete(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        upload = self.s3.uploads.pop(query["uploadId"], None)
        if upload is None:
            return 404, b"<Error><Code>NoSuchUpload</Code><Message>no such upload</Message></Error>", {}
        numbers = [int(one.text or "") for one in ET.fromstring(body).iter() if one.tag.endswith("PartNumber")]
        self._put(key, query, b"".join(upload.parts[number] for number in numbers))
        return 200, _xml("CompleteMultipartUploadResult", f'<Key>{escape(key)}</Key><ETag>"whole"</ETag>'), {}

    def _abort(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        self.s3.uploads.pop(query["uploadId"], None)
        return 204, b"", {}

    def _get(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        content = self.s3.objects.get(key)
        if content is None:
            return 404, b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>", {}
        asked = self._asked()
        headers = self._headers(key)
        if asked is None:
            return 200, content, headers
        start, end = (max(0, len(content) + asked[0]), len(content)) if asked[0] < 0 else asked
        if start >= len(content):
            return 416, b"<Error><Code>InvalidRange</Code><Message>not there</Message></Error>", {}
        piece = content[start:end]
        return 206, piece, {**headers, "Content-Range": f"bytes {start}-{start + len(piece) - 1}/{len(content)}"}

    def _head(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        status, content, headers = self._get(key, query, body)
        headers["Content-Length"] = str(len(content) if status < 400 else 0)
        return status, b"", headers

    def _headers(self, key: str) -> dict[str, str]:
        return {
            "ETag": _etag(self.s3.objects[key]),
            "Last-Modified": format_datetime(self.s3.modified[key], usegmt=True),
        }

    def _delete(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        self.s3.objects.pop(key, None)
        return 204, b"", {}

    def _delete_many(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        keys = _keys(body)
        for one in keys:
            self.s3.objects.pop(one, None)
        return 200, _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(one)}</Key></Deleted>" for one in keys)), {}

    def _list(self, key: str, query: dict[str, str], body: bytes) -> tuple[int, bytes, dict[str, str]]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        found, folded = [], set()
        for name in sorted(one for one in self.s3.objects if one.startswith(prefix)):
            head, mark, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            if mark:
                folded.add(prefix + head + delimiter)
            else:
                found.append(name)
        content = "<IsTruncated>false</IsTruncated>" + "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.s3.objects[name])}</Size><ETag>x</ETag>"
            f"<LastModified>{_iso(self.s3.modified[name])}</LastModified></Contents>"
            for name in found
        )
        content += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folded))
        return 200, _xml("ListBucketResult", content), {}


def _keys(body: bytes) -> tuple[str, ...]:
    return tuple(one.text or "" for one in ET.fromstring(body).iter() if one.tag.endswith("Key"))


def _xml(name: str, content: str) -> bytes:
    return f'<?xml version="1.0"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{content}</{name}>'.encode()


def _etag(content: bytes) -> str:
    return f'"{md5(content).hexdigest()}"'


def _iso(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%S.000Z")
