"""The comparison of a checkpoint with everything that is known about it, and the report of it."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from .._foreign.dcp_metadata import differences
from .._foreign.items import Unlocated, ValueBudgets, check_item_records, check_opaque_item, locate_all
from .._foreign.transforms import require
from .._format.dcp import is_metadata_of
from .._format.marker import (
    METADATA_NAME,
)
from .._format.records import Chunk, Entry, Manifest, OpaqueEntry, TensorEntry, ValueEntry
from .._runtime.caller import run_by_caller
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.tasks import in_parallel
from .._runtime.threads import (
    Stop,
    collected,
    holding_gil,
    io_threads,
    paced,
    pause_point,
)
from .._storage import Batches, RangeSource, ReadRange, Reads, Scratch
from ..errors import (
    CorruptCheckpointError,
    SidestreamError,
    UnsafeObjectError,
    UnsupportedCheckpointError,
    printable_lines,
)
from ..options import DigestCheck, Progress
from .checks import Piece, foreign_pieces, has_no_checksum, own_pieces, sidecar_pieces, value_pieces
from .open.parts import PART_ATTRIBUTE, part_metadata_name, read_part
from .ranges import batches
from .report import digest_check


@public
@dataclass(frozen=True, slots=True)
class Damage:
    """A place of a checkpoint that is wrong.

    Attributes:
        message: What is wrong.
        file: The file, if it is known.
        fqn: The tensor or value, if it is known.
        offset: The byte in ``file``, if it is known.
    """

    message: str
    file: str | None = None
    fqn: str | None = None
    offset: int | None = None


@public
@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Displayed):
    """The result of a verification.

    Attributes:
        url: The checkpoint.
        save_id: The id of the save that wrote it. Empty if another writer did.
        step: Its step, as ``Checkpoint.step``.
        generation: Its generation, from 1.
        nbytes: How many bytes were read.
        verified: The FQNs whose bytes were all compared and found right.
        unverified: The FQNs for which the writer left nothing to compare with (safetensors).
        damaged: The first thing that is wrong with each tensor, value or file.
        digest: Whether the digests in the checkpoint were compared in addition to its checksums. None if it has none.
        unreadable: Tensors of a kind that this version does not read (quantized ones, subclasses). Their bytes match
            the checksums of their writer, and nothing else was compared.
    """

    url: str
    save_id: str
    step: int | None
    generation: int
    nbytes: int
    verified: tuple[str, ...]
    unverified: tuple[str, ...]
    damaged: tuple[Damage, ...]
    digest: DigestCheck | None
    unreadable: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if no damage was found."""
        return not self.damaged

    def _summary(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.damaged):,} damaged"
        unverified = f", {len(self.unverified):,} without checksums" if self.unverified else ""
        return f"{self.url}: {verdict}, {len(self.verified):,} verified{unverified}, {readable_bytes(self.nbytes)} read"

    def _table(self) -> Table:
        rows = ([one.fqn or "", one.file or "", one.message] for one in self.damaged)
        return Table(("name", "file", "damage"), rows, len(self.damaged))


@dataclass(slots=True)
class Verification:
    """The verification of one checkpoint. ``damages`` are by FQN, or by file if no FQN is known."""

    source: RangeSource
    url: str
    manifest: Manifest
    progress: Progress | None = None
    damages: dict[str, Damage] = field(default_factory=dict)
    unverified: set[str] = field(default_factory=set)
    unreadable: set[str] = field(default_factory=set)
    done_bytes: int = 0
    total_bytes: int = 0
    _unread: set[str] = field(default_factory=set)
    """The FQNs of which a file could not be read."""
    _planned: set[object] = field(default_factory=set)
    _opaque: list[tuple[str, Chunk]] = field(default_factory=list)
    _budgets: ValueBudgets = field(default_factory=ValueBudgets)

    def report(self) -> VerifyReport:
        """Return the report, after ``run``. Called in a worker thread."""
        manifest, damaged = self.manifest, self.damages
        # A name is in one list only. Damage outweighs the others, since it is what the caller has to act on.
        unreadable = self.unreadable - damaged.keys()
        unverified = self.unverified - damaged.keys() - unreadable
        fqns = (fqn for fqn, one in paced(manifest.stored.items()) if isinstance(one, (tuple, TensorEntry, ValueEntry)))
        apart = unverified | unreadable | self._sharing(damaged.keys() | self._unread)
        return VerifyReport(
            url=self.url,
            save_id=manifest.save_id,
            step=manifest.step,
            generation=manifest.generation,
            nbytes=self.done_bytes,
            verified=tuple(fqn for fqn in fqns if fqn not in apart),
            unverified=tuple(sorted(unverified)),
            damaged=tuple(sorted(damaged.values(), key=lambda one: (one.file or "", one.offset or 0, one.fqn or ""))),
            digest=digest_check(manifest.digest),
            unreadable=tuple(sorted(unreadable)),
        )

    def _sharing(self, fqns: set[str]) -> set[str]:
        """Return ``fqns``, and the tensors whose bytes were not read again because they are those of one of them."""
        entries = self.manifest.entries
        places = {place for fqn in fqns for place in _places(entries.get(fqn))}
        if not places:
            return fqns
        return fqns | {fqn for fqn, one in paced(entries.items()) if not places.isdisjoint(_places(one))}

    async def run(self, planned: Callable[[], Awaitable[object]]) -> None:
        """Read and compare everything. ``planned`` is awaited before the first payload is read."""
        threads = io_threads()
        # Everything is planned before the first payload is read, so ``progress`` knows from its first call how many
        # bytes there are.
        whole = await threads.run(self._whole_items)
        pieces = await self.plan()
        runs = await threads.run(batches, pieces)
        opaque_bytes = sum(chunk.item_bytes for _, chunk in self._opaque)
        counted = await threads.run(_bytes_of, pieces, whole)
        self.total_bytes = self.done_bytes + counted + opaque_bytes
        await planned()
        await self._report_progress(0)
        await self._check_runs(runs)
        await self._check_items(whole)

    async def plan(self) -> list[Piece]:
        """Compare the metadata, and return the pieces that are to be read and compared."""
        pieces: list[Piece] = []
        # A checkpoint of ours describes itself twice, so these are compared first. One of another writer has its
        # description in zips, one for each item, and these have to be opened before there is anything to plan.
        if self.manifest.own:
            await self._compare_metadata()
            await io_threads().run(self._plan_own, pieces)
        else:
            found, errors = await locate_all(self.source, self.manifest, records="all")
            await io_threads().run(self._sort_out, errors)
            if any(chunk.transform for _, chunk in self._opaque):
                require()
            await io_threads().run(self._plan_foreign, found, pieces)
        return pieces

    async def check_whole_items(self) -> None:
        """Compare the items that cannot be compared piece by piece."""
        await self._check_items(await io_threads().run(self._whole_items))

    async def _check_items(self, whole: list[tuple[str, TensorEntry | ValueEntry, Chunk | ValueEntry]]) -> None:
        await in_parallel(whole, lambda item: self._check_whole(*item))
        for fqn, chunk in self._opaque:
            with self._noting(fqn):
                await check_opaque_item(self.source, fqn, chunk, self._budgets)
            await self._report_progress(chunk.item_bytes)

    async def _compare_metadata(self) -> None:
        """Compare ``.metadata`` with the manifest. Both were written from one plan. Stock DCP reads the former, and
        sidestream the latter."""
        if self.manifest.parts:
            await self._compare_parts()
            return
        nbytes = (await self.source.sizes()).get(METADATA_NAME, 0)
        read = await self.source.read_metadata(METADATA_NAME, nbytes)

        def compare() -> None:
            with self._noting(METADATA_NAME):
                # Planners add data, and ranks share lists of chunks. Otherwise the bytes are known, and are compared
                # without decoding, which makes a hundred thousand objects for 10,000 tensors.
                if self.manifest.exact and not self.manifest.ranks and is_metadata_of(self.manifest.entries, read):
                    return
                for difference in differences(self.manifest, read):
                    self._note(difference, METADATA_NAME)

        await io_threads().run(compare)
        self.done_bytes += nbytes

    async def _compare_parts(self) -> None:
        """Compare the metadata that stock DCP reads with the manifest, for each part that a rank has saved without the
        others."""
        sizes = await self.source.sizes()
        for marker in self.manifest.parts:
            name = part_metadata_name(marker.rank)
            with self._noting(name):
                part = await read_part(self.source, sizes, marker)
                # Each part has an id of its own, because parts are saved without the other ranks. ``storage_meta``
                # names the one in the marker.
                part = replace(part, save_id=marker.save_id)
                raw = await self.source.read_metadata(name, sizes.get(name, 0))
                found = await io_threads().run(differences, part, raw, PART_ATTRIBUTE, name)
                for difference in found:
                    difference.file = name
                    self._note(difference, name)
                self.done_bytes += len(raw)

    def _plan_own(self, pieces: list[Piece]) -> None:
        seen: set[Chunk] = set()
        for fqn, entry in self.manifest.entries.items():
            pause_point()
            with self._noting(fqn):
                # Tied tensors are one item in the file: it is read once, and what is wrong with it is found for all of
                # them (``_sharing``).
                if isinstance(entry, TensorEntry) and not seen.issuperset(entry.chunks):
                    seen.update(entry.chunks)
                    pieces.extend(own_pieces(fqn, entry))
                elif isinstance(entry, ValueEntry) and self.manifest.exact:
                    pieces.extend(value_pieces(fqn, entry))
        for name, entry in self.manifest.sidecars.items():
            pieces.extend(sidecar_pieces(name, entry))

    def _plan_foreign(self, found: Mapping[str, TensorEntry], pieces: list[Piece]) -> None:
        """Plan the reads of a foreign checkpoint. ``found`` has the tensors whose zips could be opened. Called in a
        worker thread."""
        # Nothing of such a checkpoint has checksums (safetensors), so all of it is read for its size alone.
        if not self.manifest.checked:
            self.unverified.update(self.manifest.entries)
        for fqn, entry in self.manifest.entries.items():
            pause_point()
            if not isinstance(entry, TensorEntry):
                continue
            if any(map(has_no_checksum, entry.chunks)):
                self.unverified.add(fqn)
            if fqn in found:
                pieces.extend(foreign_pieces(fqn, found[fqn], self._planned))

    def _sort_out(self, errors: Mapping[str, Unlocated]) -> None:
        """Record damage. Put tensors of a kind that this version does not read aside, to be compared as a whole. Called
        in a worker thread."""
        for fqn, error in paced(errors.items()):
            with self._noting(fqn):
                # There are two kinds of errors. A tensor whose kind this version does not know is not damage: its bytes
                # are compared with the checksums of the zip. Any other error is what a load would raise.
                if not isinstance(error, UnsupportedCheckpointError):
                    raise error
                self.unreadable.add(fqn)
                entry = self.manifest.entries[fqn]
                assert isinstance(entry, TensorEntry | OpaqueEntry)
                whole = isinstance(entry, TensorEntry)  # compressed ones are checked with those of other tensors
                self._opaque.extend((fqn, chunk) for chunk in entry.chunks if not (whole and chunk.transform))

    def _whole_items(self) -> list[tuple[str, TensorEntry | ValueEntry, Chunk | ValueEntry]]:
        """Return the items of other writers that are read as a whole: values, including those that DCP's planner has
        pickled in a checkpoint of sidestream, and compressed items. Called in a worker thread."""
        found: list[tuple[str, TensorEntry | ValueEntry, Chunk | ValueEntry]] = []
        if not self.manifest.exact:
            for fqn, entry in self.manifest.entries.items():
                pause_point()
                if isinstance(entry, ValueEntry) and not entry.inline:
                    found.append((fqn, entry, entry))
                elif isinstance(entry, TensorEntry):
                    found.extend((fqn, entry, chunk) for chunk in entry.chunks if chunk.transform)
        if any(item.transform for _, _, item in found):
            require()
        return found

    async def _check_whole(self, fqn: str, entry: TensorEntry | ValueEntry, item: Chunk | ValueEntry) -> None:
        with self._noting(fqn):
            try:
                if not await check_item_records(self.source, fqn, entry, item, self._budgets):
                    self.unverified.add(fqn)
            except UnsupportedCheckpointError:
                self.unreadable.add(fqn)
        await self._report_progress(item.item_bytes)

    async def _check_runs(self, runs: Sequence[Sequence[Piece]]) -> None:
        done = self.done_bytes

        async def report(read: int) -> None:
            if self.progress is not None:
                await run_by_caller(self.progress, done + read, self.total_bytes)

        # One call reads a run of pieces. If the call fails, no piece of it was compared, so damage is recorded for all
        # of them, under the name of the file.
        def noting(run: Sequence[Piece]) -> AbstractContextManager[None]:
            return _Noting(partial(self._note_unread, run), run[0].file)

        checked = Batches(self.source, self._reads, report, noting=noting)
        try:
            await checked.run(runs)
        finally:
            self.done_bytes += checked.nbytes

    def _reads(self, run: Sequence[Piece], scratch: Scratch, stop: Stop | None) -> Reads:
        """Return the reads for a run of pieces of one file. Called in a thread."""
        sizes = [piece.nbytes for piece in run]
        memory, views = scratch.views(sizes)
        ranges = [
            ReadRange(piece.offset, view, partial(self._check, piece, view))
            for piece, view in zip(run, views, strict=True)
        ]
        return Reads(run[0].file, ranges, sum(sizes), memory)

    def _check(self, piece: Piece, view: memoryview) -> None:
        """Compare a piece. Called in a thread of the store when the bytes have arrived."""
        with self._noting(piece.fqn):
            piece.check(view, holding_gil)

    def _note_unread(self, run: Sequence[Piece], damage: SidestreamError, what: str) -> None:
        """Record that a run of pieces could not be read."""
        self._unread.update(piece.fqn for piece in run)
        self._note(damage, what)

    def _noting(self, what: str) -> _Noting:
        """Record damage that is raised in this context under the name ``what``, and continue with the rest."""
        return _Noting(self._note, what)

    def _note(self, damage: SidestreamError, what: str) -> None:
        self.damages.setdefault(getattr(damage, "fqn", None) or what, damage_of(damage))

    async def _report_progress(self, nbytes: int) -> None:
        self.done_bytes += nbytes
        if self.progress is not None:
            await run_by_caller(self.progress, self.done_bytes, self.total_bytes)


class _Noting:
    """The context of ``Verification._noting``. It is entered for each piece; a generator would take longer than the
    checksum of a small one."""

    __slots__ = ("_note", "_what")

    def __init__(self, note: Callable[[SidestreamError, str], None], what: str) -> None:
        self._note, self._what = note, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if isinstance(error, (CorruptCheckpointError, UnsafeObjectError)):
            self._note(error, self._what)
        elif isinstance(error, FileNotFoundError):
            file = os.path.basename(str(error.filename))
            self._note(CorruptCheckpointError(f"{error.filename} is missing", file=file), self._what)
        else:
            return False
        return True


def _places(entry: Entry | None) -> Iterator[object]:
    for chunk in entry.chunks if isinstance(entry, TensorEntry) else ():
        yield chunk.file, chunk.item_offset, chunk.payload_offset


def _bytes_of(pieces: Iterable[Piece], whole: Iterable[tuple[str, Entry, Chunk | ValueEntry]]) -> int:
    return sum(collected(piece.nbytes for piece in pieces)) + sum(collected(item.item_bytes for _, _, item in whole))


def damage_of(error: SidestreamError) -> Damage:
    message = printable_lines(str(error.args[0]))
    if isinstance(error, CorruptCheckpointError):
        return Damage(message, error.file, error.fqn, error.offset)
    return Damage(message)
