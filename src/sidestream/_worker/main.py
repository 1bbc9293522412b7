"""The writer process: reads frames, hands them to requests, and ends when the trainer does.

It is started by ``process.spawn``. Nothing of the trainer's program is imported here, nor torch.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
import traceback
from contextlib import suppress
from mmap import MAP_POPULATE, MAP_SHARED, mmap
from typing import Any

from .._format.checksum import CRC_ENGINE
from .._storage import Store, locate_run
from ..events import Event, observe
from ..options import Storage, StorePolicy
from .copying import Copier, read_memory
from .faults import pack_event
from .wire import Channel, Outbox, WorkerMessage, WorkerMessageKind, pack, unpack
from .work import READY, UNUSED, Request, WriteRate

__all__ = ["main"]

_BEAT_S = 1.0
_GATHER_S = 0.25  # at most: when half of the memory is free, the trainer hears of it at once
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_CLASSES = {"low": (2 << 13) | 7, "idle": 3 << 13}
_OOM_SCORE = "500"


def main(descriptor: int, trainer: int) -> None:
    """Serve the process ``trainer`` over ``descriptor``. Does not return."""
    _die_with(trainer)
    with suppress(OSError):  # who wakes up does not take a core from who is running there
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # any other was chosen
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to whole groups: the trainer decides
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        _WorkerServer(channel, trainer).serve()
    except BrokenPipeError:
        pass  # the trainer is gone
    except BaseException:  # the edge of the process: the trainer sees it end, whoever looks at stderr sees why
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads of storage clients do not survive an orderly end


def _die_with(trainer: int) -> None:
    """EOF says it too, but not to a process that a forked worker of the trainer keeps the socket open for."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    library.prctl(_PR_SET_NAME, b"sidestream-save", 0, 0, 0)
    if os.getppid() != trainer:
        os._exit(0)


class _WorkerServer:
    def __init__(self, channel: Channel, trainer: int) -> None:
        self._channel = channel
        self._outbox = Outbox(channel)
        self._trainer = trainer
        self._copier = Copier(trainer, self._answer)
        self._memories: dict[int, mmap] = {}
        self._requests: dict[int, Request] = {}
        self._rate = WriteRate(None)

    def serve(self) -> None:
        logging.getLogger("sidestream").addHandler(logging.NullHandler())  # the trainer logs what it is told
        with observe(self._tell):
            while (frames := self._channel.receive()) is not None:
                while frames:
                    self._handle(frames.pop(0))

    def _handle(self, frame: WorkerMessage) -> None:
        if frame.kind == WorkerMessageKind.SETUP:
            self._set_up(unpack(frame.body))
        elif frame.kind == WorkerMessageKind.SEGMENT:
            self._map(frame)
        elif frame.kind == WorkerMessageKind.FORGET:
            self._memories.pop(frame.number, None)
        elif frame.kind == WorkerMessageKind.WRITE:
            self._begin(frame)
        elif frame.kind == WorkerMessageKind.FILL:
            self._copier.fill(frame.number, frame.body, self._memories)
        elif frame.kind == WorkerMessageKind.CANCEL and self._copier.cancel(frame.number):
            """It is answered when nothing is copied any more."""
        else:
            request = self._requests.get(frame.number)
            if request is not None:
                request.handle(frame, self._memories)
            elif frame.kind == WorkerMessageKind.READY:  # it has failed, and this comes too late
                for file, window, *_ in READY.iter_unpack(frame.body):
                    self._outbox.send_later(
                        WorkerMessageKind.UNUSED, frame.number, UNUSED.pack(file, window), urgent=lambda: True
                    )

    def _set_up(self, asked: dict[str, Any]) -> None:
        """Before a thread is started that writes: on Linux these are properties of threads, and inherited."""
        with suppress(OSError):
            os.nice(asked["nice"])
        if asked["affinity"] is not None:
            with suppress(OSError):  # none of them is there (any more)
                os.sched_setaffinity(0, asked["affinity"])
                self._copier.set_affinity(asked["affinity"])
        number = _IOPRIO_SET.get(os.uname().machine)
        if number is not None and asked["io_priority"] in _IO_CLASSES:
            ctypes.CDLL(None).syscall(number, 1, 0, _IO_CLASSES[asked["io_priority"]])
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(_OOM_SCORE)  # where memory is short, the trainer is worth more
        self._rate = WriteRate(asked["rate_bytes_per_s"])
        about = {"pid": os.getpid(), "crc": CRC_ENGINE, "reads_memory": self._reads_memory(*asked["probe"])}
        self._outbox.send_now(WorkerMessageKind.UP, 0, pack(about))
        threading.Thread(target=self._beat, name="sidestream-beat", daemon=True).start()

    def _reads_memory(self, address: int, expected: bytes) -> bool:
        """Whether the system lets this process read the trainer's: some security modules do not."""
        found = ctypes.create_string_buffer(len(expected))
        try:
            read_memory(self._trainer, address, ctypes.addressof(found), len(expected))
        except OSError:
            return False
        return found.raw == expected

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                if not self._outbox.flush(_BEAT_S, _GATHER_S):
                    self._outbox.send_now(WorkerMessageKind.BEAT, 0)

    def _answer(self, kind: WorkerMessageKind, number: int, body: bytes) -> None:
        with suppress(OSError):  # the trainer is gone: the thread that reads hears of it too, and ends this process
            self._outbox.send_now(kind, number, body)

    def _map(self, frame: WorkerMessage) -> None:
        assert frame.descriptor is not None
        nbytes = int.from_bytes(frame.body, "little")
        try:
            # Populated: one call instead of a fault for each page.
            self._memories[frame.number] = mmap(frame.descriptor, nbytes, flags=MAP_SHARED | MAP_POPULATE)
        finally:
            os.close(frame.descriptor)

    def _begin(self, frame: WorkerMessage) -> None:
        asked = unpack(frame.body)
        number = frame.number
        os.umask(asked["umask"])  # of the trainer: it may have changed
        request = self._requests[number] = Request(
            number,
            asked,
            lambda: self._store(asked["url"], asked["storage"]),
            self._outbox,
            self._rate,
            self._ended,
        )
        request.start()  # once it is known: it may end at once

    def _ended(self, number: int) -> None:
        self._requests.pop(number, None)

    @staticmethod
    def _store(url: str, told: dict[str, Any]) -> Store:
        """Of one request. Its client, with the connections, is kept below, for as long as its credentials are valid."""
        policy = None if told["policy"] is None else StorePolicy(**told["policy"])
        return locate_run(url, Storage(**{**told, "policy": policy}))[0]

    def _tell(self, event: Event) -> None:
        packed = pack_event(event)
        if packed is not None:
            self._outbox.send_later(WorkerMessageKind.EVENT, 0, packed)
