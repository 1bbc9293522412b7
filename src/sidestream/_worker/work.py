"""In the writer process: one request, from its first file to the receipt. The code that writes is the trainer's own."""

from __future__ import annotations

import ctypes
import queue
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from mmap import mmap
from typing import Any

from .._format.layout_bytes import pack_sums, unpack_layout
from .._runtime.threads import Deadline, Stop, time_limit
from .._storage import Attempt, Body, BytesBody, ShardBody, Store
from ..errors import ClosedError
from .faults import pack_error
from .wire import Outbox, WorkerMessage, WorkerMessageKind, unpack

__all__ = ["READY", "Request", "WriteRate", "name_and_rest"]

READY = struct.Struct("<IIQQQ")  # file, window, number of the memory, where in it, bytes
UNUSED = struct.Struct("<II")  # file, window
SUMS = struct.Struct("<IQ")  # file, bytes of CRCs


class WriteRate:
    """So many bytes per second, all requests together."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def spend(self, nbytes: int, stop: Stop) -> None:
        """Wait until they may be written. Raises ``ClosedError`` when ``stop`` is set."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + nbytes / self._bytes_per_s
        while (wait_s := begin - time.monotonic()) > 0:
            stop.check()
            time.sleep(min(wait_s, 0.05))


class _TrainerWindow:
    """A window in the trainer's memory. It has been let go of when nothing refers to it any more: a client of object
    storage may hold it for longer than the part that it came from."""

    def __init__(self, nbytes: int, rate: WriteRate, unused: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self._rate = rate
        self._unused = unused
        self._changed = threading.Condition()
        self._anchor: Any = None
        self._gone = False

    def arrive(self, memory: mmap, start: int) -> None:
        anchor = (ctypes.c_char * self.nbytes).from_buffer(memory, start)
        weakref.finalize(anchor, self._unused).atexit = False
        with self._changed:
            self._anchor = None if self._gone else anchor
            self._changed.notify_all()

    def wait(self, end: int, *, deadline: Deadline, stop: Stop) -> memoryview:
        with stop.waking(self._wake), self._changed:
            while self._anchor is None:
                stop.check()
                if self._gone:
                    raise ClosedError("this window was released")
                if not self._changed.wait(deadline.remaining_s()):
                    raise deadline.exceeded(f"staging of {self.nbytes} bytes")
            view = memoryview(self._anchor).cast("B")
        self._rate.spend(self.nbytes, stop)
        return view

    def release(self) -> None:
        with self._changed:
            self._anchor, self._gone = None, True
            self._changed.notify_all()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _WindowCounts:
    """How many have come, and were let go of: finalizers take no locks, and ``append`` needs none."""

    def __init__(self) -> None:
        self.arrived = 0
        self._returned: list[None] = []
        self._reported = 0

    def count_returned(self) -> bool:
        """Of one more; whether the trainer has to hear of it now, as half of what it knows to be in use is not: it may
        be waiting for just this memory."""
        self._returned.append(None)
        returned = len(self._returned)
        if 2 * (returned - self._reported) < self.arrived - self._reported:
            return False
        self._reported = returned
        return True


class Request:
    """Files that come one after the other, and a thread that writes them. Frames are handled in the one that reads."""

    def __init__(
        self,
        number: int,
        asked: dict[str, Any],
        store: Callable[[], Store],
        outbox: Outbox,
        rate: WriteRate,
        ended: Callable[[int], None],
    ) -> None:
        self._deadline = Deadline(asked["at"], asked["timeout_s"])
        self._attempt = Attempt(asked["target"], "joined", asked["save_id"], asked["durability"])
        self._number = number
        self._store = store
        self._outbox = outbox
        self._rate = rate
        self._ended = ended
        self._stop = Stop()
        self._files: queue.SimpleQueue[tuple[str, Body] | None] = queue.SimpleQueue()
        self._images: list[list[_TrainerWindow]] = []
        self._windows = _WindowCounts()

    def start(self) -> None:
        """Whoever hands it frames knows it by then: ``ended`` may be called at any time from now on."""
        threading.Thread(target=self._run, name=f"sidestream-saver-{self._number}", daemon=True).start()

    # --- the thread that reads frames ---

    def handle(self, frame: WorkerMessage, memories: dict[int, mmap]) -> None:
        if frame.kind == WorkerMessageKind.READY:
            self._windows.arrived += len(frame.body) // READY.size
            for file, window, memory, start, _ in READY.iter_unpack(frame.body):
                self._images[file][window].arrive(memories[memory], start)
        elif frame.kind == WorkerMessageKind.CANCEL:
            self._stop.set()
            self._files.put(None)
        elif frame.kind == WorkerMessageKind.END:
            self._files.put(None)
        elif frame.kind == WorkerMessageKind.BYTES_FILE:
            name, rest = name_and_rest(frame.body)
            self._images.append([])
            self._files.put((name, BytesBody(bytes(rest))))
        elif frame.kind == WorkerMessageKind.SHARD_FILE:
            self._files.put(self._shard(frame.body))

    def _shard(self, packed: bytes) -> tuple[str, Body]:
        said, rest = name_and_rest(packed)
        name, digest = unpack(said.encode())
        layout = unpack_layout(rest)
        file = len(self._images)
        images = [
            _TrainerWindow(window.end - window.start, self._rate, self._unused(file, index))
            for index, window in enumerate(layout.windows)
        ]
        self._images.append(images)
        return name, ShardBody(layout, images, digest)

    def _unused(self, file: int, window: int) -> Callable[[], None]:
        packed, number, outbox, windows = UNUSED.pack(file, window), self._number, self._outbox, self._windows

        def unused() -> None:  # wherever the last reference dies
            outbox.send_later(WorkerMessageKind.UNUSED, number, packed, urgent=windows.count_returned)

        return unused

    # --- the thread that writes ---

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._answer(WorkerMessageKind.FAILED, pack_error(error))
        else:
            self._answer(WorkerMessageKind.DONE, b"")
        finally:
            self._ended(self._number)  # first: what is handed over from now on is sent back at once
            for images in self._images:
                for image in images:
                    image.release()

    def _answer(self, kind: WorkerMessageKind, body: bytes) -> None:
        try:
            self._outbox.send_now(kind, self._number, body)
        except OSError:
            """The trainer is gone: the thread that reads hears of it too, and ends this process."""

    def _write(self) -> None:
        with time_limit(self._deadline):
            self._store().begin(self._attempt).write_here(self._bodies(), stop=self._stop)

    def _bodies(self) -> Iterator[tuple[str, Body]]:
        """Whoever asks for the next one has written the last one, synced."""
        for file in range(1 << 32):
            item = self._next()
            if item is None:
                return
            yield item
            crcs, digests = pack_sums(item[1].sums) if isinstance(item[1], ShardBody) else (b"", b"")
            del item
            self._outbox.send_now(
                WorkerMessageKind.FILE_DONE, self._number, SUMS.pack(file, len(crcs)) + crcs + digests
            )

    def _next(self) -> tuple[str, Body] | None:
        try:
            item = self._files.get(timeout=self._deadline.remaining_s())
        except queue.Empty:
            raise self._deadline.exceeded("waiting for the next file") from None
        self._stop.check()
        return item


def name_and_rest(body: bytes) -> tuple[str, memoryview]:
    """A text with its length before it, and what follows."""
    end = 4 + int.from_bytes(body[:4], "little")
    return body[4:end].decode(), memoryview(body)[end:]
