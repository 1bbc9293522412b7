"""Messages between the program and a writer process."""

from __future__ import annotations

import socket
import threading
import tracemalloc
from contextlib import closing

from sidestream._worker.wire import Channel, WorkerMessageKind


def test_large_bodies_are_sent_without_a_copy() -> None:
    messages = [
        (WorkerMessageKind.WRITE, 7, b"small"),
        (WorkerMessageKind.BYTES_FILE, 7, bytes(range(256)) * (32 << 12)),
        (WorkerMessageKind.END, 7, b""),
    ]
    ours, theirs = socket.socketpair()
    received, scratch = [0], bytearray(1 << 20)

    def receive() -> None:
        while nbytes := theirs.recv_into(scratch):
            received[0] += nbytes

    listening = threading.Thread(target=receive)
    listening.start()
    with closing(theirs):
        with closing(ours):
            tracemalloc.start()
            Channel(ours).send_all(messages)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        listening.join()
    assert received[0] > 32 << 20
    assert peak < 1 << 20


def test_small_messages_are_sent_in_one_call() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # one read for each call of the other end
    with closing(ours), closing(theirs):
        Channel(ours).send_all([(WorkerMessageKind.WRITE, 7, b"order"), (WorkerMessageKind.END, 7, b"")])
        found = Channel(theirs).receive()
    assert found is not None
    assert [(one.kind, one.body) for one in found] == [
        (WorkerMessageKind.WRITE, b"order"),
        (WorkerMessageKind.END, b""),
    ]
