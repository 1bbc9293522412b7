"""The files of a save in the form that a store takes, in the trainer and in its writer process. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from .._format.checksum import digest_of
from .._format.shard import BlockSums, Sealer, ShardLayout, Window
from .._runtime.threads import Stop, holding_gil, paced, wait_for_change
from ..options import Digest


class FilePart(Protocol):
    """A part of a file. The code that takes a part releases it, when the part has been written or will not be."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def take(self, stop: Stop) -> memoryview:
        """Block until the content is there, and return it. Raises what staging raised, and ``ClosedError`` when
        ``stop`` is set."""

    def release(self) -> None:
        """Allow the memory of the part to be used again. Idempotent. A part that was never taken is released too."""


class Body(Protocol):
    """The content of a file as a sequence of parts. Several threads may take parts at once, and each takes them in this
    order, because a part may wait for the checksums of the parts before it."""

    @property
    def nbytes(self) -> int: ...

    @property
    def aligned(self) -> bool:
        """Whether every part begins on a page of memory and has a multiple of 4096 bytes, as direct I/O needs it."""

    @property
    def parts(self) -> Sequence[FilePart]: ...


@dataclass(frozen=True, slots=True)
class BytesBody:
    """A small file whose content is one ``bytes`` object. It is its own only part."""

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
        """Do nothing: the caller owns the memory."""


class PiecesBody:
    """A file whose content is a sequence of ``bytes`` objects, which are written without being joined."""

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
    """Memory that is being filled for one reader. The reader may write to the bytes that hold no payload."""

    @property
    def nbytes(self) -> int: ...

    def wait(self, end: int, *, stop: Stop) -> memoryview:
        """Block until ``end`` bytes are there, and return the memory. Raises the error that ended the filling,
        ``DeadlineExceededError``, and ``ClosedError`` when ``stop`` is set."""

    def release(self) -> None:
        """Give the memory back: the reader does not use it any more."""


class ShardBody:
    """A shard file that is being staged. A thread of the writer frames each window and computes its checksums when it
    takes the window."""

    aligned = True

    def __init__(self, layout: ShardLayout, images: Sequence[Image], digest: Digest | None) -> None:
        self.nbytes = layout.nbytes
        self.layout = layout
        self.images = images
        self.digest = digest
        self.written: set[int] = set()
        """The numbers of the windows whose memory was released."""
        self._sealer = Sealer(layout, None if digest is None else digest_of(digest), holding_gil)
        pairs = enumerate(zip(layout.windows, images, strict=True))
        self.parts = tuple(
            _WindowPart(window, image, self._sealer, partial(self.written.add, number))
            for number, (window, image) in pairs
        )

    @property
    def sums(self) -> BlockSums:
        """The checksums of the blocks. They are complete when the last part has been taken."""
        return self._sealer.sums


@dataclass(frozen=True, slots=True)
class _WindowPart:
    """A window of a shard file. Its memory is given back when it has been written."""

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
        view = self.image.wait(self.nbytes, stop=stop)
        wait = partial(wait_for_change, stop=stop, name="checksums of the windows before")
        for _ in paced(self.sealer.seal(view, self.window, wait=wait), every=1):
            stop.check()
        return view[: self.nbytes]

    def release(self) -> None:
        self.released()
        self.image.release()
