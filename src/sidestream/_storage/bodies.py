"""The files of a save as a store takes them, in the trainer and in its writer process alike. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from .._format.digest import digest_of
from .._format.shard import BlockSums, Sealer, ShardLayout, Window
from .._runtime.threads import (
    Deadline,
    Stop,
    current_deadline,
    holding_gil,
    wait_for_change,
    yielding_gil,
)
from ..options import Digest

__all__ = ["Body", "BytesBody", "FilePart", "Image", "PiecesBody", "ShardBody", "ShowingPart"]


class FilePart(Protocol):
    """Some of a file. Whoever takes it releases it, when it has been written or will not be."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def take(self, stop: Stop) -> memoryview:
        """Block until the content is there. Raises what staging raised, ``ClosedError`` when ``stop`` is set."""

    def release(self) -> None:
        """The memory may be used for something else. Idempotent; also for a part that was never taken."""


@runtime_checkable
class ShowingPart(FilePart, Protocol):
    """A part that goes through its content anyway, and can show it while it is still in the processor's cache."""

    def take_showing(self, stop: Stop, seen: Callable[[memoryview], object] | None) -> memoryview:
        """``take``; ``seen`` is given the content first, run by run in its order."""


class Body(Protocol):
    """The content of a file, one part after the other. Several threads may take parts at once, each in this order: a
    part may wait for what comes of those before it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def aligned(self) -> bool:
        """Whether every part begins on a page of memory and is a multiple of 4096 bytes, as direct I/O needs it."""

    @property
    def parts(self) -> Sequence[FilePart]: ...


@dataclass(frozen=True, slots=True)
class BytesBody:
    """A small file that is in memory as a whole."""

    content: bytes
    aligned: bool = False
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return len(self.content)

    @property
    def parts(self) -> Sequence[BytesBody]:
        return (self,)

    def take(self, stop: Stop) -> memoryview:
        return memoryview(self.content)

    def release(self) -> None:
        """It is the caller's."""


class PiecesBody:
    """A file that is in memory in pieces, one after the other: they are not joined first."""

    aligned = False

    def __init__(self, pieces: Iterable[bytes]) -> None:
        parts: list[BytesBody] = []
        self.nbytes = 0
        for piece in pieces:
            if piece:
                parts.append(BytesBody(piece, offset=self.nbytes))
                self.nbytes += len(piece)
        self.parts: Sequence[BytesBody] = tuple(parts)


class Image(Protocol):
    """Memory that is being filled for one reader, which may write where no payload goes."""

    @property
    def nbytes(self) -> int: ...

    def wait(self, end: int, *, deadline: Deadline, stop: Stop) -> memoryview:
        """Block until ``end`` bytes are there. Raises what made the filling fail; ``ClosedError`` when ``stop`` is
        set."""

    def release(self) -> None:
        """The reader is done with it."""


class ShardBody:
    """A shard as it is staged: each window is framed and checksummed on its way to storage, in a writer's thread."""

    aligned = True

    def __init__(self, layout: ShardLayout, images: Sequence[Image], digest: Digest | None) -> None:
        self.nbytes = layout.nbytes
        self.layout = layout
        self.images = images
        self.digest = digest
        self.written: set[int] = set()
        """Windows that need their memory no more, by number."""
        self._sealer = Sealer(layout, None if digest is None else digest_of(digest), holding_gil)
        pairs = enumerate(zip(layout.windows, images, strict=True))
        self.parts = tuple(
            _WindowPart(window, image, self._sealer, partial(self.written.add, number))
            for number, (window, image) in pairs
        )

    @property
    def sums(self) -> BlockSums:
        """Complete when the last part has been taken."""
        return self._sealer.sums


@dataclass(frozen=True, slots=True)
class _WindowPart:
    """A window, whose memory goes back when it has been written."""

    window: Window
    image: Image
    sealer: Sealer
    released: Callable[[], None]

    @property
    def offset(self) -> int:
        return self.window.start

    @property
    def nbytes(self) -> int:
        return self.image.nbytes

    def take(self, stop: Stop) -> memoryview:
        return self.take_showing(stop, None)

    def take_showing(self, stop: Stop, seen: Callable[[memoryview], object] | None) -> memoryview:
        deadline = current_deadline()
        view = self.image.wait(self.nbytes, deadline=deadline, stop=stop)
        wait = partial(wait_for_change, stop=stop, name="checksums of the windows before")
        for _ in yielding_gil(self.sealer.seal(view, self.window, wait=wait, seen=seen), every=1):
            stop.check()
        return view[: self.nbytes]

    def release(self) -> None:
        self.released()
        self.image.release()
