"""A socket that takes what S3 clients upload, and keeps nothing: how fast could a client be if its server cost nothing?

Prints its port and serves until its input ends. What was sent is listed with its size, and cannot be read.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from urllib.parse import parse_qs

_CREATED = (
    b"<InitiateMultipartUploadResult><Bucket>b</Bucket><Key>k</Key><UploadId>u</UploadId>"
    b"</InitiateMultipartUploadResult>"
)
_COMPLETED = (
    b"<CompleteMultipartUploadResult><Location>l</Location><Bucket>b</Bucket><Key>k</Key><ETag>&quot;e&quot;</ETag>"
    b"</CompleteMultipartUploadResult>"
)
_LISTED = (
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><KeyCount>%d</KeyCount>'
    b"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>%s</ListBucketResult>"
)
_ENTRY = (
    b"<Contents><Key>%s</Key><LastModified>2026-11-21T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag>"
    b"<Size>%d</Size><StorageClass>STANDARD</StorageClass></Contents>"
)
_BELOW = b"<CommonPrefixes><Prefix>%s</Prefix></CommonPrefixes>"
_ABSENT = b"<Error><Code>NoSuchKey</Code><Message>nothing is kept here</Message></Error>"


class Connection:
    def __init__(self, peer: socket.socket, sizes: dict[bytes, int]) -> None:
        self._peer = peer
        self._sizes = sizes
        self._pending = b""
        self._sink = memoryview(bytearray(1 << 20))

    def serve(self) -> None:
        while (head := self._until(b"\r\n\r\n")) is not None:
            first, *lines = head.split(b"\r\n")
            method, target, _ = first.split(b" ", 2)
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
            if headers.get(b"expect") == b"100-continue":
                self._peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            nbytes = self._take_content(headers)
            self._peer.sendall(self._answer(method, *target.partition(b"?")[::2], nbytes))

    def _answer(self, method: bytes, path: bytes, query: bytes, nbytes: int) -> bytes:
        status, content, more = b"200 OK", b"", b""
        if method == b"PUT":
            self._sizes[path] = self._sizes.get(path, 0) + nbytes
            more = b'ETag: "e"\r\n'
        elif method == b"POST" and b"uploadId=" in query:
            content = _COMPLETED
        elif method == b"POST" and b"uploads" in query:
            content = _CREATED
        elif method == b"HEAD" and path in self._sizes:
            more = b'ETag: "e"\r\nLast-Modified: Sat, 21 Nov 2026 00:00:00 GMT\r\n'
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n" % (self._sizes[path], more)
        elif method == b"HEAD":
            status = b"404 Not Found"
        elif method == b"GET" and path.strip(b"/").count(b"/") == 0:
            content = self._listed(path.strip(b"/"), query)
        elif method == b"GET":
            status, content = b"404 Not Found", _ABSENT
        elif method == b"DELETE":
            status = b"204 No Content"
        head = b"HTTP/1.1 %s\r\nContent-Type: application/xml\r\n%sContent-Length: %d\r\n\r\n"
        return head % (status, more, len(content)) + content

    def _listed(self, bucket: bytes, query: bytes) -> bytes:
        """What begins with the prefix; with a delimiter, what lies directly below."""
        asked = parse_qs(query)
        prefix, delimiter = asked.get(b"prefix", [b""])[0], asked.get(b"delimiter", [b""])[0]
        start = len(bucket) + 2
        names = {path[start:]: size for path, size in self._sizes.items() if path[start:].startswith(prefix)}
        below: dict[bytes, None] = {}
        if delimiter:
            cut = len(prefix)
            below = dict.fromkeys(prefix + n[cut:].partition(delimiter)[0] for n in names if delimiter in n[cut:])
            names = {name: size for name, size in names.items() if delimiter not in name[cut:]}
        entries = [_ENTRY % one for one in names.items()] + [_BELOW % (name + delimiter) for name in below]
        return _LISTED % (len(entries), b"".join(entries))

    def _take_content(self, headers: dict[bytes, bytes]) -> int:
        if b"chunked" not in headers.get(b"transfer-encoding", b""):
            nbytes = int(headers.get(b"content-length", 0))
            self._drop(nbytes)
            return nbytes
        total = 0
        while True:
            nbytes = int((self._until(b"\r\n") or b"0").split(b";")[0], 16)
            self._drop(nbytes + 2)
            total += nbytes
            if nbytes == 0:
                return total

    def _until(self, mark: bytes) -> bytes | None:
        while mark not in self._pending:
            more = self._peer.recv(1 << 16)
            if not more:
                return None
            self._pending += more
        found, _, self._pending = self._pending.partition(mark)
        return found

    def _drop(self, nbytes: int) -> None:
        here = min(len(self._pending), nbytes)
        self._pending = self._pending[here:]
        nbytes -= here
        while nbytes:
            got = self._peer.recv_into(self._sink[: min(nbytes, len(self._sink))])
            if not got:
                raise ConnectionError
            nbytes -= got


def _serve(peer: socket.socket, sizes: dict[bytes, int]) -> None:
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            Connection(peer, sizes).serve()
        except (OSError, ValueError):
            return


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listening.getsockname()[1], flush=True)
    sizes: dict[bytes, int] = {}

    def accept() -> None:
        while True:
            peer, _ = listening.accept()
            threading.Thread(target=_serve, args=(peer, sizes), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
