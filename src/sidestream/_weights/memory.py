"""The memory of versions, within the budget of a publisher."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from .._runtime.threads import Stop, Threads
from ..errors import ArenaExhaustedError
from .images import ImageMemory

_LATER_S = 0.2
"""How long the next version's memory waits to be touched: servers take up the present version meanwhile. With a
low priority the thread might wait for a processor while it holds the lock of the memory of the process."""


@dataclass(frozen=True, slots=True)
class _Spare:
    """Memory that is touched ahead, in a thread, until ``stop``."""

    nbytes: int
    stop: Stop
    touched: Future[ImageMemory]


class VersionMemory:
    """The memory of all versions, within a budget. The next version's is touched ahead in a thread of its own, because
    fresh pages cost ten times the copy into them."""

    def __init__(self, budget_bytes: int | None) -> None:
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._sizes: dict[object, int] = {}
        """The bytes of each image. They are removed without a lock: a garbage collection may do it, in any thread, and
        in a forked child."""
        self._spare: _Spare | None = None
        self._threads = Threads("sidestream-touch", 1)
        self._closed = False

    @property
    def spare_bytes(self) -> int:
        spare = self._spare
        return 0 if spare is None else spare.nbytes

    def take(self, nbytes: int) -> ImageMemory:
        """Return memory for an image. Blocks. Raises ``ArenaExhaustedError``."""
        spare = self._taken_spare()
        if spare is not None and spare.nbytes == nbytes:
            return spare
        if spare is not None:
            spare.discard()
        with self._lock:
            if not self._fits(nbytes):
                raise ArenaExhaustedError(
                    f"a version of {nbytes} bytes does not fit: {self.used_bytes} of "
                    f"budget_bytes={self._budget_bytes} are in use by versions that are held; raise budget_bytes=, or "
                    "lower keep="
                )
            key = self._reserved(nbytes)
        return self._made(nbytes, key)

    @property
    def used_bytes(self) -> int:
        """The bytes of all images and of what is touched ahead."""
        return sum(list(self._sizes.values()))

    def _fits(self, nbytes: int) -> bool:
        return self._budget_bytes is None or self.used_bytes + nbytes <= self._budget_bytes

    def _reserved(self, nbytes: int) -> object:
        self._sizes[key := object()] = nbytes
        return key

    def _made(self, nbytes: int, key: object) -> ImageMemory:
        try:
            return ImageMemory(nbytes, partial(self._sizes.pop, key, None))
        except BaseException:
            self._sizes.pop(key, None)
            raise

    def _taken_spare(self) -> ImageMemory | None:
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is None:
            return None
        spare.stop.set()
        with suppress(ArenaExhaustedError):
            return spare.touched.result()  # after a few milliseconds: it is touched piece by piece
        return None

    def touch_ahead(self, nbytes: int) -> None:
        """Touch memory for the next version in the background, if it fits into the budget."""
        with self._lock:
            if self._closed or self._spare is not None or not self._fits(nbytes):
                return
            stop, key = Stop(), self._reserved(nbytes)
            try:
                self._spare = _Spare(nbytes, stop, self._threads.submit(self._touch, nbytes, key, stop))
            except RuntimeError:  # the system starts no thread: the next version touches its memory itself
                self._sizes.pop(key)

    def _touch(self, nbytes: int, key: object, stop: Stop) -> ImageMemory:
        memory, go_on = self._made(nbytes, key), threading.Event()
        with stop.waking(go_on.set):
            if not stop.is_set():
                go_on.wait(_LATER_S)
        memory.touch(stop)
        return memory

    def close(self) -> None:
        """Free what is touched ahead."""
        with self._lock:
            self._closed = True
        if (spare := self._taken_spare()) is not None:
            spare.discard()
        self._threads.close()
