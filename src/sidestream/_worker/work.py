"""One request inside the writer process, from its first file to its receipts. The code that writes is the same as in
the trainer."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from mmap import mmap
from typing import Any

from .._format.shard import ShardLayout
from .._runtime.error_data import data_of
from .._runtime.rate import RateLimiter
from .._runtime.threads import Deadline, Stop, time_limit, wait_for_change
from .._storage import Attempt, Body, BytesBody, ShardBody, Store
from ..errors import ClosedError
from .wire import READY, SUMS, UNUSED, Outbox, WorkerMessage, WorkerMessageKind, head_and_rest, pack, unpack


class _TrainerWindow:
    """A window in the trainer's memory. It is unused when no reference to its memory is left: a client of object
    storage may keep one for longer than the file part does."""

    def __init__(self, nbytes: int, rate: RateLimiter, unused: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self._rate = rate
        self._unused = unused
        self._changed = threading.Condition()
        self._anchor: Any = None
        self._gone = False

    def arrive(self, memory: mmap, start: int) -> None:
        """Make the window available: its bytes are at ``start`` of ``memory``."""
        # Every view that the store or its client makes refers to this array. Its finalizer is the only thing that
        # reports the window as unused, so memory that a client still holds, such as a part of an upload that is
        # repeated, is never reported.
        anchor = (ctypes.c_char * self.nbytes).from_buffer(memory, start)
        weakref.finalize(anchor, self._unused).atexit = False
        with self._changed:
            self._anchor = None if self._gone else anchor
            self._changed.notify_all()

    def wait(self, end: int, *, stop: Stop) -> memoryview:
        """Wait until the window is available, and return its bytes. Raises ``ClosedError`` and
        ``DeadlineExceededError``."""
        with self._changed:
            while self._anchor is None:
                if self._gone:
                    raise ClosedError("this window was released")
                wait_for_change(self._changed, stop, f"staging of {self.nbytes} bytes")
            view = memoryview(self._anchor).cast("B")
        self._rate.spend(self.nbytes, stop)
        return view

    def release(self) -> None:
        """Drop the reference to the memory."""
        with self._changed:
            self._anchor, self._gone = None, True
            self._changed.notify_all()


class _WindowCounts:
    """The numbers of windows that have arrived and that are unused again. No locks, because finalizers count."""

    def __init__(self) -> None:
        self.arrived = 0
        self._returned: list[None] = []
        self._reported = 0

    def count_returned(self) -> bool:
        """Count one more unused window. Return whether the trainer has to be notified now, because half of the windows
        that it takes for used are not: it may be waiting for this memory."""
        # Appending and taking the length are atomic. A finalizer may run while another one does, in the same thread.
        self._returned.append(None)
        returned = len(self._returned)
        if 2 * (returned - self._reported) < self.arrived - self._reported:
            return False
        self._reported = returned
        return True


class Request:
    """The files of one request, which arrive one after the other, and a thread that writes them. Messages are handled
    in the thread that reads them."""

    def __init__(
        self,
        number: int,
        order: dict[str, Any],
        store: Callable[[], Store],
        outbox: Outbox,
        rate: RateLimiter,
        ended: Callable[[int], None],
    ) -> None:
        self._deadline = Deadline(order["at"], order["timeout_s"])
        self._attempt = Attempt(order["target"], "joined", order["save_id"], order["durability"])
        self._number = number
        self._store = store
        self._outbox = outbox
        self._rate = rate
        self._ended = ended
        self._stop = Stop()
        self._files: queue.SimpleQueue[tuple[str, Body] | None] = queue.SimpleQueue()
        self._images: list[list[_TrainerWindow]] = []
        self._all_there = False  # no further file will arrive
        self._windows = _WindowCounts()

    def start(self) -> None:
        """Start the thread that writes. Register the request before, because ``ended`` may be called at once."""
        threading.Thread(target=self._run, name=f"sidestream-saver-{self._number}", daemon=True).start()

    # --- the thread that reads messages ---

    def handle(self, message: WorkerMessage, memories: dict[int, mmap]) -> None:
        """Handle a message about this request."""
        if message.kind == WorkerMessageKind.READY:
            self._windows.arrived += len(message.body) // READY.size
            for file, window, memory, start, _ in READY.iter_unpack(message.body):
                self._images[file][window].arrive(memories[memory], start)
        elif message.kind == WorkerMessageKind.CANCEL:
            # The thread may be waiting for a window or for the next file. The flag ends the first wait, and the None
            # the second.
            self._stop.set()
            self._files.put(None)
        elif message.kind == WorkerMessageKind.END:
            self._all_there = True
            self._files.put(None)
        elif message.kind == WorkerMessageKind.BYTES_FILE:
            name, rest = head_and_rest(message.body)
            self._images.append([])
            self._files.put((name.decode(), BytesBody(bytes(rest))))
        elif message.kind == WorkerMessageKind.SHARD_FILE:
            self._files.put(self._shard(message.body))

    def _shard(self, packed: bytes) -> tuple[str, Body]:
        head, rest = head_and_rest(packed)
        name, digest = unpack(head)
        layout = ShardLayout.unpack(rest)
        file = len(self._images)
        images = [
            _TrainerWindow(window.end - window.start, self._rate, self._unused(file, index))
            for index, window in enumerate(layout.windows)
        ]
        self._images.append(images)
        return name, ShardBody(layout, images, digest)

    def _unused(self, file: int, window: int) -> Callable[[], None]:
        packed, number, outbox, windows = UNUSED.pack(file, window), self._number, self._outbox, self._windows

        def unused() -> None:  # called in any thread, where the last reference is dropped
            outbox.send_later(WorkerMessageKind.UNUSED, number, packed, urgent=windows.count_returned)

        return unused

    # --- the thread that writes ---

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._answer(WorkerMessageKind.FAILED, pack(data_of(error, "the writer process")))
        else:
            self._answer(WorkerMessageKind.DONE, b"")
        finally:
            self._ended(self._number)  # first: windows that arrive from now on are returned at once
            for images in self._images:
                for image in images:
                    image.release()

    def _answer(self, kind: WorkerMessageKind, body: bytes) -> None:
        try:
            self._outbox.send_now(kind, self._number, body)
        except OSError:
            """The trainer has ended: the thread that reads notices it too, and ends this process."""

    def _write(self) -> None:
        with time_limit(self._deadline):
            self._store().begin(self._attempt).write(self._bodies(), stop=self._stop)

    def _bodies(self) -> Iterator[tuple[str, Body]]:
        """Yield the files. When the store requests the next file, the last one is written and synced, and its receipt
        is sent. That of the last file of all is sent together with the end of the request, which follows at once."""
        for file in range(1 << 32):
            item = self._next()
            if item is None:
                return
            yield item
            crcs, digests = item[1].sums.pack() if isinstance(item[1], ShardBody) else (b"", b"")
            del item
            receipt = SUMS.pack(file, len(crcs)) + crcs + digests
            if self._all_there and file + 1 == len(self._images):
                self._outbox.send_later(WorkerMessageKind.FILE_DONE, self._number, receipt)
            else:
                self._outbox.send_now(WorkerMessageKind.FILE_DONE, self._number, receipt)

    def _next(self) -> tuple[str, Body] | None:
        try:
            item = self._files.get(timeout=self._deadline.remaining_s())
        except queue.Empty:
            raise self._deadline.exceeded("waiting for the next file") from None
        self._stop.check()
        return item
