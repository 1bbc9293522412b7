"""The main loop of the writer process: it reads messages, passes them to requests, and ends with the trainer.

``process.spawn`` starts it. It imports neither the trainer's program nor torch.
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
from .._runtime.rate import RateLimiter
from .._storage import Store, locate_run
from ..events import Event, observe
from ..options import Storage, StorePolicy
from .wire import READY, UNUSED, Channel, Outbox, WorkerMessage, WorkerMessageKind, pack, pack_event, unpack
from .work import Request

_BEAT_S = 1.0
_GATHER_S = 0.25  # at most: when half of the memory is free, the trainer is notified at once
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IO_CLASSES = {"low": (2 << 13) | 7, "idle": 3 << 13}
_OOM_SCORE = "500"


def main(descriptor: int, trainer: int) -> None:
    """Serve the process ``trainer`` over ``descriptor``. Does not return."""
    _die_with(trainer)
    with suppress(OSError):  # batch scheduling: a thread that wakes up does not preempt a thread of the trainer
        if os.sched_getscheduler(0) == os.SCHED_OTHER:  # any other policy was chosen by the user
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # sent to whole process groups: the trainer decides
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        _WorkerServer(channel, trainer).serve()
    except BrokenPipeError:
        pass  # the trainer has ended
    except BaseException:  # the edge of the process: the trainer sees that it ends, and stderr shows why
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # threads of storage clients do not survive an orderly end


def _die_with(trainer: int) -> None:
    """Have the system kill this process when the trainer ends. EOF on the socket is not enough, because a forked worker
    of the trainer may keep the socket open."""
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    library.prctl(_PR_SET_NAME, b"sidestream-save", 0, 0, 0)
    if os.getppid() != trainer:
        os._exit(0)


class _WorkerServer:
    """The state of the writer process: mapped memory and requests."""

    def __init__(self, channel: Channel, trainer: int) -> None:
        self._channel = channel
        self._outbox = Outbox(channel)
        self._trainer = trainer
        self._memories: dict[int, mmap] = {}
        self._requests: dict[int, Request] = {}
        self._rate = RateLimiter(None)

    def serve(self) -> None:
        """Handle messages until the trainer closes its end of the socket."""
        logging.getLogger("sidestream").addHandler(
            logging.NullHandler()
        )  # the trainer logs the events that it receives
        with observe(self._send_event):
            while (messages := self._channel.receive()) is not None:
                while messages:
                    self._handle(messages.pop(0))

    def _handle(self, message: WorkerMessage) -> None:
        if message.kind == WorkerMessageKind.SETUP:
            self._set_up(unpack(message.body))
        elif message.kind == WorkerMessageKind.SEGMENT:
            self._map(message)
        elif message.kind == WorkerMessageKind.FORGET:
            self._memories.pop(message.number, None)
        elif message.kind == WorkerMessageKind.WRITE:
            self._begin(message)
        else:
            request = self._requests.get(message.number)
            # The messages of one request arrive in their order. Those of a request that has failed here may still
            # arrive, because the trainer has sent them before it knew. Their windows are returned at once, or the
            # trainer would wait for them.
            if request is not None:
                request.handle(message, self._memories)
            elif message.kind == WorkerMessageKind.READY:  # the request has failed already
                for file, window, *_ in READY.iter_unpack(message.body):
                    self._outbox.send_later(
                        WorkerMessageKind.UNUSED, message.number, UNUSED.pack(file, window), urgent=lambda: True
                    )

    def _set_up(self, options: dict[str, Any]) -> None:
        """Apply the options of the process. Before a thread that writes is started: on Linux these are properties of
        threads, and new threads inherit them."""
        with suppress(OSError):
            os.nice(options["nice"])
        if options["affinity"] is not None:
            with suppress(OSError):  # none of these processors is available (any more)
                os.sched_setaffinity(0, options["affinity"])
        number = _IOPRIO_SET.get(os.uname().machine)
        if number is not None and options["io_priority"] in _IO_CLASSES:
            ctypes.CDLL(None).syscall(number, 1, 0, _IO_CLASSES[options["io_priority"]])
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(_OOM_SCORE)  # when memory runs out, the kernel shall kill this process before the trainer
        self._rate = RateLimiter(options["max_bytes_per_second"])
        about = {"pid": os.getpid(), "crc": CRC_ENGINE}
        self._outbox.send_now(WorkerMessageKind.UP, 0, pack(about))
        threading.Thread(target=self._beat, name="sidestream-beat", daemon=True).start()

    def _beat(self) -> None:
        with suppress(OSError):
            while True:
                if not self._outbox.flush(_BEAT_S, _GATHER_S):
                    self._outbox.send_now(WorkerMessageKind.BEAT, 0)

    def _map(self, message: WorkerMessage) -> None:
        assert message.descriptor is not None
        nbytes = int.from_bytes(message.body, "little")
        try:
            # Populated: one call instead of a fault for each page.
            self._memories[message.number] = mmap(message.descriptor, nbytes, flags=MAP_SHARED | MAP_POPULATE)
        finally:
            os.close(message.descriptor)

    def _begin(self, message: WorkerMessage) -> None:
        order = unpack(message.body)
        number = message.number
        os.umask(order["umask"])  # that of the trainer, which may have changed
        request = self._requests[number] = Request(
            number,
            order,
            lambda: self._store(order["url"], order["storage"]),
            self._outbox,
            self._rate,
            self._ended,
        )
        request.start()  # after it was registered, because it may end at once

    def _ended(self, number: int) -> None:
        self._requests.pop(number, None)

    @staticmethod
    def _store(url: str, storage: dict[str, Any]) -> Store:
        """Return the store of one request. Clients and their connections are cached by ``_storage`` for as long as
        their credentials are valid."""
        policy = None if storage["policy"] is None else StorePolicy(**storage["policy"])
        return locate_run(url, Storage(**{**storage, "policy": policy}))[0]

    def _send_event(self, event: Event) -> None:
        packed = pack_event(event)
        if packed is not None:
            self._outbox.send_later(WorkerMessageKind.EVENT, 0, packed)
