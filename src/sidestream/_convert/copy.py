"""``copy``: copies a checkpoint from one store to another unchanged, and compares the result with the source."""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from .._engine.calls import in_operation
from .._format.checksum import crc32
from .._format.marker import METADATA_NAME
from .._format.records import EmptyEntry, Manifest
from .._format.safetensors import INDEX_NAME
from .._load.checks import Piece
from .._load.open.manifest import all_there, from_one_checkpoint
from .._load.open.parts import part_metadata_name
from .._load.verification import Verification
from .._runtime.caller import run_by_caller
from .._runtime.public import public
from .._runtime.tasks import in_parallel, running_loop
from .._runtime.threads import Deadline, Stop, holding_gil, io_threads, paced, pause_point, time_limit
from .._save.running import Save, SaveOrder
from .._save.task import run_here
from .._storage import (
    ABANDONED_AFTER_S,
    PIECE_BYTES,
    Location,
    RangeSource,
    ReadRange,
    Scratch,
    Transaction,
    id_of,
    locate_by_caller,
)
from ..errors import CheckpointNotFoundError, CorruptCheckpointError, InvalidOptionError, StorageError
from ..options import Durability, Progress, Storage, check_budget, check_choice, check_timeout
from .windows import WINDOWS, PlainFiles, WindowedFile, Windows

_MOST_WINDOW_BYTES = 64 << 20
_PAGE_BYTES = 4096


@public
@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of a copy. All that arrived was compared with what was read.

    Attributes:
        url: The target.
        files: The names of the files.
        nbytes: The bytes of all files together.
        verified: The names of tensors and values that were compared with the checksums of their writer.
        unverified: The names of those that have no checksums.
    """

    url: str
    files: tuple[str, ...]
    nbytes: int
    verified: tuple[str, ...]
    unverified: tuple[str, ...]


@public
async def copy(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    budget_bytes: int = 256 << 20,
    durability: Durability = "fsync",
    progress: Progress | None = None,
    timeout_s: float = 3600.0,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    target_storage_options: Mapping[str, Any] | None = None,
    target_storage: Storage | None = None,
) -> CopyReport:
    """Copy the checkpoint at ``source`` to the new ``target`` without a change.

    Files keep their names and every byte, so signatures stay valid. All files of a directory are copied, without its
    subdirectories and what interrupted saves left behind. Bytes are compared with the checksums of their writer as they
    pass, and are read back from ``target`` before it is visible.

    When it returns, ``target`` is visible as a whole and, with ``durability="fsync"``, durable. On object storage a
    single file is visible before it has been read back, and so is the last file of a directory without ``.metadata``:
    the index of safetensors, if it has one.

    After an error or a cancel nothing is visible, and what was written has been removed.

    Args:
        source: A checkpoint of sidestream or of stock DCP, a file of ``torch.save``, or a file or directory of
            safetensors.
        target: A new file or directory.
        budget_bytes: The most memory for payloads, in bytes; 96 MiB at least.
        durability: ``"fsync"`` or ``"flush"``, as for ``SaveOptions``.
        progress: Called on the event loop with the bytes written and read back so far and the bytes to write and read
            back. What it raises ends the copy. If another save replaces the checkpoint meanwhile, the copy begins
            again, and so does the progress.
        timeout_s: The limit of the whole copy, in seconds.
        storage_options: What the fsspec file system of ``source`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``source`` is reached.
        target_storage_options: As ``storage_options``, for ``target``.
        target_storage: How the storage at ``target`` is reached.

    Returns:
        What was copied.

    Raises:
        InvalidOptionError, MissingExtraError: The call is wrong, or a package is missing.
        CheckpointNotFoundError: There is no checkpoint at ``source``, or it was replaced again and again.
        CheckpointExistsError: There is something at ``target``.
        CorruptCheckpointError: Bytes of ``source`` are missing or altered.
        NoSpaceError, AccessDeniedError, StorageError: The storage failed, or returned other bytes than were written.
        DeadlineExceededError, OutOfMemoryError: The time or the memory did not suffice.
        NotDurableError: ``target`` is visible, but a sync failed.
        OutcomeUnknownError: The commit was sent, and its result could not be read back.
    """
    running_loop("copy")
    check_choice("durability", durability, Durability)
    check_timeout(timeout_s)
    check_budget(budget_bytes)
    where = await locate_by_caller(target, target_storage_options, target_storage, "target_")
    location = await locate_by_caller(source, storage_options, storage)

    deadline = Deadline.after(timeout_s)

    async def copy_of(files: RangeSource, manifest: Manifest) -> _Found:
        with all_there(location.url):
            found = await _look(files, location, manifest)
            save = Save(
                where,
                deadline,
                SaveOrder(durability=durability, verb="copy"),
                kind="file" if found.single else "files",
            )
            copying = _Copy(found, where, min(_MOST_WINDOW_BYTES, budget_bytes // WINDOWS), progress)

            async def write() -> bytes | None:
                await save.begin(sum(found.sizes.values()))
                return await copying.write(save.transaction)

            await run_here(save, write, PlainFiles(found.sizes))
        return found

    async def work() -> _Found:
        with time_limit(deadline):
            return await from_one_checkpoint(location, copy_of)

    found = await in_operation(work, "copy")
    return CopyReport(
        url=where.url,
        files=tuple(found.sizes),
        nbytes=sum(found.sizes.values()),
        verified=tuple(fqn for fqn in found.names if fqn not in found.unverified),
        unverified=tuple(sorted(found.unverified)),
    )


@public
async def remove(
    url: str | os.PathLike[str],
    *,
    durability: Durability = "fsync",
    timeout_s: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> None:
    """Remove the checkpoint, or the export, in the directory or below the prefix ``url``, with everything else that is
    in it.

    It disappears in one step for all readers, and its files are deleted after that: a local directory is renamed first,
    and on object storage and with ``commit="marker"`` the marker is deleted first. There files of other saves stay,
    because they may be committed meanwhile. A load in progress fails. What killed saves, exports and conversions to
    ``url`` have left is removed too: at once where a lock shows that their process has ended, elsewhere if nothing has
    been written to it for an hour. Leases of a run do not prevent it;
    retention (``keep=`` of a ``Checkpointer``) respects them. With several ranks one rank calls it.

    After an error or a cancel files may be left that are not a checkpoint any more. On object storage a second call
    removes them.

    Args:
        url: The checkpoint, of sidestream or of stock DCP, or an export of sidestream. It is not a run, not a single
            file, and no other directory.
        durability: With ``"fsync"`` the removal is durable before files are deleted.
        timeout_s: The limit of the whole call, in seconds.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.

    Raises:
        InvalidOptionError, MissingExtraError: The call is wrong, or a package is missing.
        CheckpointNotFoundError: There is neither a checkpoint nor an export at ``url``, and nothing was left behind
            there. What else is there stays.
        StorageError, AccessDeniedError, DeadlineExceededError: The storage failed, or the time did not suffice.
    """
    running_loop("remove")
    check_choice("durability", durability, Durability)
    check_timeout(timeout_s)
    location = await locate_by_caller(url, storage_options, storage)
    await in_operation(partial(_remove, location, durability, timeout_s), "remove")


async def _remove(location: Location, durability: Durability, timeout_s: float) -> None:
    with time_limit(Deadline.after(timeout_s)):
        refused = CheckpointNotFoundError(
            f"no checkpoint at {location.url}: there is no {METADATA_NAME}; nothing was removed"
        )
        there = False
        try:
            # Two things may be at the URL: a checkpoint or an export, and what killed saves left of others. The second
            # is looked for even if the first is refused, so that a failed save can be cleared away.
            there = await location.store.remove_directory(location.name, durability=durability)
        except CheckpointNotFoundError as error:
            refused = error
        collected = await location.store.collect(location.name, after_s=ABANDONED_AFTER_S)
        if not there and not collected:
            raise refused


# --- the files to copy ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Found:
    """The files of ``source`` in the order in which they are written. The last one completes the checkpoint.
    ``single``: there is only one file, which is the target itself."""

    source: RangeSource
    url: str
    sizes: Mapping[str, int]
    single: bool
    pieces: Mapping[str, Sequence[Piece]]
    names: Sequence[str]
    unverified: frozenset[str]
    marker_crc: int = 0


async def _look(source: RangeSource, location: Location, manifest: Manifest) -> _Found:
    single, url = source.name != location.name, location.url
    if not single and not location.store.capabilities.listing:
        raise InvalidOptionError(f"{url}: the server has no listings, so the files of a directory are not known")
    verification = Verification(source, url, manifest)
    pieces, left_out = await io_threads().run(_by_file, await verification.plan())
    await verification.check_whole_items()
    if verification.damages:
        first = next(iter(verification.damages.values()))
        raise CorruptCheckpointError(f"{url}: {first.message}", file=first.file, fqn=first.fqn, offset=first.offset)
    names = await io_threads().run(_names, manifest)
    unverified = frozenset(verification.unverified | verification.unreadable | left_out)
    if single:
        return _Found(source, url, manifest.files, True, pieces, names, unverified)
    listed = await source.sizes()
    gone = await io_threads().run(_gone, listed, manifest)
    if gone:
        raise CorruptCheckpointError(f"{url}: {gone} was deleted while it was read", file=gone)
    sizes = await io_threads().run(_in_order, listed, manifest)
    marker_crc = 0
    if METADATA_NAME in sizes:
        raw = await source.read_metadata(METADATA_NAME, sizes[METADATA_NAME])
        marker_crc = await io_threads().run(crc32, raw)
    return _Found(source, url, sizes, False, pieces, names, unverified, marker_crc)


def _names(manifest: Manifest) -> list[str]:
    return [fqn for fqn, one in paced(manifest.entries.items()) if not isinstance(one, EmptyEntry)]


def _gone(listed: Mapping[str, int], manifest: Manifest) -> str:
    """Return a file that existed when the checkpoint was opened and is not in the listing. Empty if there is none."""
    expected = [*manifest.files, *([METADATA_NAME] if manifest.own and not manifest.parts else [])]
    return next((name for name in paced(expected) if name not in listed), "")


def _in_order(listed: Mapping[str, int], manifest: Manifest) -> dict[str, int]:
    """Return the files to copy. The file that makes them a checkpoint for readers is the last one."""
    # Without the files of uncommitted attempts, which have another id in their names on object storage.
    sizes = {name: nbytes for name, nbytes in paced(listed.items()) if id_of(name) in (None, manifest.save_id)}
    markers = [name for name in (METADATA_NAME, INDEX_NAME, part_metadata_name(0)) if name in sizes]
    # The last file completes the copy for readers: the marker, the index of safetensors, the first part; of files
    # without any of these the largest.
    last = markers[0] if markers else max(sizes, key=lambda name: sizes[name])
    return {**{name: nbytes for name, nbytes in sizes.items() if name != last}, last: sizes[last]}


# --- the copy -------------------------------------------------------------------------------------------------------


class _CopiedFile:
    """A file that is copied in windows. A piece with a checksum lies in one window."""

    def __init__(self, name: str, nbytes: int, pieces: Sequence[Piece], window_bytes: int) -> None:
        self.name, self.nbytes = name, nbytes
        ends = _ends(nbytes, pieces, window_bytes)
        self.windows = list(pairwise([0, *ends]))
        self.aligned = all(end % _PAGE_BYTES == 0 for end in ends)
        self.crcs = [0] * len(self.windows)
        self._pieces: list[list[Piece]] = [[] for _ in self.windows]
        for piece in pieces:
            self._pieces[bisect_right(ends, piece.offset)].append(piece)

    def seal(self, index: int, view: memoryview, stop: Stop) -> None:
        """Compare the bytes with their checksums, and store the CRC of the window."""
        start, _ = self.windows[index]
        for piece in self._pieces[index]:
            stop.check()
            piece.check(view[piece.offset - start : piece.offset - start + piece.nbytes], holding_gil)
        self.crcs[index] = crc32(view)


def _ends(nbytes: int, pieces: Sequence[Piece], window_bytes: int) -> list[int]:
    """Return the ends of the windows of a file. A window ends at a page if ``pieces`` allow it."""
    ends: list[int] = []
    start = done = paged = 0
    for piece in pieces:
        end = piece.offset + piece.nbytes
        while end > start + window_bytes and piece.offset > start:
            start = paged if paged > start else max(done, min(piece.offset, start + window_bytes))
            ends.append(start)
        if piece.offset % _PAGE_BYTES == 0:
            paged = piece.offset
        done = end
    while nbytes > start + window_bytes:
        start = done if done > start else start + window_bytes
        ends.append(start)
    if nbytes > start:
        ends.append(nbytes)
    return ends


def _by_file(pieces: Iterable[Piece]) -> tuple[dict[str, list[Piece]], set[str]]:
    """Return the pieces by file in order, and the FQNs of pieces that were left out because they overlap with others.
    Only a forged checkpoint has such pieces."""
    found: dict[str, list[Piece]] = {}
    left_out: set[str] = set()
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        pause_point()
        before = found.setdefault(piece.file, [])
        if before and piece.offset < before[-1].offset + before[-1].nbytes:
            left_out.add(piece.fqn)
        elif piece.nbytes:
            before.append(piece)
    return found, left_out


@dataclass(slots=True)
class _Copy:
    found: _Found
    where: Location
    window_bytes: int
    progress: Progress | None
    _done_bytes: int = 0

    async def write(self, into: Transaction) -> bytes | None:
        """Write all files except ``.metadata``, which is returned because the commit writes it."""
        found = self.found
        files = [
            _CopiedFile(
                self.where.name if found.single else name, nbytes, found.pieces.get(name, ()), self.window_bytes
            )
            for name, nbytes in found.sizes.items()
        ]
        await self._report_progress(0)
        *others, last = files
        if others:
            await self._write(others, into)
        if last.name == METADATA_NAME:
            return await self._marker()
        await self._write([last], into)
        return None

    async def _marker(self) -> bytes:
        found, nbytes = self.found, self.found.sizes[METADATA_NAME]
        raw = await found.source.read_file(METADATA_NAME, nbytes)
        if crc32(raw) != found.marker_crc:
            raise CorruptCheckpointError(
                f"{found.url}: {METADATA_NAME} has changed while it was copied", file=METADATA_NAME
            )
        await self._report_progress(2 * nbytes)
        return bytes(raw)

    async def _write(self, files: Sequence[_CopiedFile], into: Transaction) -> None:
        found = self.found
        names = {file.name: next(iter(found.sizes)) if found.single else file.name for file in files}

        async def fill(file: WindowedFile, index: int, view: memoryview) -> None:
            start, _ = file.windows[index]
            begins = range(0, len(view), PIECE_BYTES)
            ranges = [ReadRange(start + begin, view[begin : begin + PIECE_BYTES]) for begin in begins]
            try:
                await found.source.read(names[file.name], ranges)
            except FileNotFoundError as error:
                raise CorruptCheckpointError(
                    f"{error.filename} was deleted while it was copied", file=names[file.name]
                ) from error
            await self._report_progress(len(view))

        await Windows(fill).write(files, into)
        # Before the commit: what does not come back as it was sent is never visible, except where names on object
        # storage are final from the beginning.
        await self._read_back(files, into)

    async def _read_back(self, files: Sequence[_CopiedFile], into: Transaction) -> None:
        if not files:
            return
        windows = ((file, index) for file in files for index in range(len(file.windows)))
        scratch = Scratch()
        directory = into.path_of(files[0].name).rpartition("/")[0]
        written = self.where.store.source(directory or ".")

        async def work(window: tuple[_CopiedFile, int]) -> None:
            file, index = window
            start, end = file.windows[index]
            memory = scratch.take(end - start)
            view = memoryview(memory)[: end - start]
            name = into.path_of(file.name)
            try:
                await written.read(name.rpartition("/")[2], [ReadRange(start, view)])
            except (CorruptCheckpointError, FileNotFoundError) as error:
                raise StorageError(errno.EIO, f"the written file cannot be read back: {error}", name) from error
            if await io_threads().run(crc32, view) != file.crcs[index]:
                raise StorageError(
                    errno.EIO, f"other bytes were read back than were written, from offset {start} on", name
                )
            del view
            scratch.give_back(memory)
            await self._report_progress(end - start)

        async with aclosing(written):
            await in_parallel(windows, work)

    async def _report_progress(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        if self.progress is not None:
            await run_by_caller(self.progress, self._done_bytes, 2 * sum(self.found.sizes.values()))
