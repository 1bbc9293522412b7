"""``HF``: an export of a save for transformers, from the snapshot that is also the source of the checkpoint."""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from .._format.records import CompositeEntry
from .._format.safetensors import INDEX_NAME, SUFFIX
from .._group import Operation, prepare_together
from .._layout.names import new_dtypes, new_names, selected
from .._layout.save_layout import SavePlan
from .._load.open.manifest import holds
from .._load.open.steps import Step
from .._runtime.memory_maps import MemoryMap
from .._runtime.public import public
from .._runtime.threads import Stop, current_deadline, io_threads
from .._runtime.torch_probes import dtype_from_name
from .._save.order import SaveOrder
from .._staging import SnapshotReader, memory_behind
from .._storage import ABANDONED_AFTER_S, Body, BytesBody, Location, is_plain_name, locate_directory, read_sources
from ..errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidOptionError,
    RankFailuresError,
    SaveAbortedError,
    SkippedError,
    SnapshotLostError,
    UnsupportedTensorError,
    allocating,
    without_frames,
)
from ..options import (
    ConvertOptions,
    Dtypes,
    Durability,
    FileSource,
    Names,
    Storage,
    check_count,
    check_dtype,
    check_names,
    storage_of,
)
from .convert import ConvertReport, How, convert_opened
from .selection import Selection
from .source import Source, open_source_at
from .targets import OutTensor, SafetensorsFile, safetensors_layout

__all__ = ["HF"]

_STEP = "{step}"
_GONE = frozenset(one.__name__ for one in (CheckpointNotFoundError, CorruptCheckpointError, FileNotFoundError))
"""The errors of a reader whose checkpoint is replaced or removed meanwhile."""
_PART_BYTES = 16 << 20
_MOST_HELD_BYTES = 256 << 20


@public
@dataclass(frozen=True, slots=True)
class HF:
    """An export for ``export=``: a directory of safetensors as transformers reads it, with an index if it has several
    files.

    Only tensors are exported. Tied tensors are written once, under the first of their names; the header of the file has
    the other names, as those of the safetensors package do.

    Args:
        url: The directory, which must not exist. For a ``Checkpointer`` its last part may contain ``{step}``; a step
            that is saved again replaces its export then (``docs/exports.md``).
        select: Patterns of names in the checkpoint (``"model.*"``). None: every tensor.
        names: The name in the export of each name in the checkpoint (``options.Names``), such as
            ``strip_prefix("model.")``. None leaves a tensor out.
        dtype: What floating-point tensors are converted to, or patterns of names in the export and what those are
            converted to (``options.Dtypes``).
        max_shard_bytes: The size of a file above which the next one begins, in bytes.
        files: Further files of the directory, such as ``config.json``, by name: their content, or the path of a regular
            file of this machine, of 64 MiB at most. A path is read when the export begins.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.

    Raises:
        InvalidOptionError: A name in ``files`` is not a plain file name, or another argument is wrong.
    """

    url: str | os.PathLike[str]
    _: KW_ONLY
    select: str | Collection[str] | None = None
    names: Names | None = None
    dtype: Dtypes | None = None
    max_shard_bytes: int = 5 << 30
    files: Mapping[str, FileSource] = field(default_factory=dict)
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    storage: Storage | None = None

    def __post_init__(self) -> None:
        storage_of(self.storage_options, self.storage)
        check_count("max_shard_bytes", self.max_shard_bytes)
        check_dtype(self.dtype)
        check_names(self.names)
        for name in self.files:
            if not is_plain_name(name) or name.endswith(SUFFIX) or name == INDEX_NAME:
                raise InvalidOptionError(
                    f"files={name!r} has to be a plain file name, and no name of the export itself"
                )

    @property
    def counts_steps(self) -> bool:
        """True if ``{step}`` is in the last part of ``url``."""
        return _STEP in os.fspath(self.url).rstrip("/").rpartition("/")[2]

    def sink(self, *, step: int | None, durability: Durability) -> _Sink:
        """Return the sink that writes the export of one save. Called by the save."""
        in_run = _STEP in os.fspath(self.url)
        if in_run and step is None:
            raise InvalidOptionError(
                f"{self.url}: only the export of a Checkpointer may contain {_STEP}: a save has no step"
            )
        location = self._at(step)
        return _Sink(self, location, durability, replaces=in_run)

    async def prune(self, keep: int, *, durability: Durability) -> None:
        """Delete the exports of a run but for the ``keep`` of the highest steps. Called by the ``Checkpointer``."""
        store = self._at(0).store
        before, _, after = os.fspath(self.url).rstrip("/").rpartition("/")[2].partition(_STEP)
        pattern = re.compile(f"{re.escape(before)}(0|[1-9][0-9]*){re.escape(after)}")
        found = [match for name in await store.directories() if (match := pattern.fullmatch(name))]
        kinds = {match: await store.look_at(match[0]) for match in found}
        for match in (match for match, kind in kinds.items() if kind == "leftover"):
            await store.collect(match[0], after_s=ABANDONED_AFTER_S)
        exports = [match for match, kind in kinds.items() if kind == "export"]
        for match in sorted(exports, key=lambda one: int(one[1]))[:-keep]:
            await store.retire(match[0], durability=durability, use="prune")

    def _at(self, step: int | None) -> Location:
        url = os.fspath(self.url).replace(_STEP, str(step))
        return locate_directory(url, storage_of(self.storage_options, self.storage))


class _Candidate(NamedTuple):
    """A tensor that may be exported. Tensors with one ``identity`` are tied. ``composite`` is the type of a tensor that
    consists of others."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    identity: object
    composite: str = ""


def _choose(export: HF, candidates: Sequence[_Candidate], url: str) -> Selection:
    """Select and name the tensors to write. Called in a worker thread. Raises ``MissingKeysError``,
    ``KeyCollisionError``, ``InvalidOptionError`` and ``UnsupportedTensorError``."""
    taken = set(selected((one.fqn for one in candidates), export.select, url))
    identities = {one.fqn: one.identity for one in candidates}
    chosen = [one.fqn for one in candidates if one.fqn in taken]
    named = new_names(export.names, chosen, url, identity=identities.__getitem__)
    found = Selection(left_out=tuple(one.fqn for one in candidates if named.get(one.fqn) is None))
    tensors = ((new, one.dtype, one.shape) for one in candidates if (new := named.get(one.fqn)) is not None)
    dtypes = new_dtypes(tensors, export.dtype, url)
    first: dict[object, str] = {}
    cast: list[str] = []
    for one in candidates:
        new = named.get(one.fqn)
        if new is None or new in found.origin:
            continue
        if one.composite:
            raise UnsupportedTensorError(
                f"{one.fqn}: it is a {one.composite}, and safetensors hold plain tensors only; "
                "leave it out with select="
            )
        leader = first.setdefault(one.identity, new)
        if leader != new:
            found.aliases[new] = leader
            continue
        dtype = dtypes.get(new, one.dtype)
        if dtype != one.dtype:
            cast.append(new)
        nbytes = math.prod(one.shape) * dtype_from_name(dtype).itemsize
        found.tensors.append(OutTensor(new, dtype, one.shape, nbytes, (new,), one.identity))
        found.origin[new] = one.fqn
    return replace(found, order=list(found.origin), cast=tuple(cast), wholes=tuple(found.origin))


@dataclass(slots=True)
class _Sink:
    """The export of one save. ``replaces``: it replaces an earlier export."""

    export: HF
    location: Location
    durability: Durability
    replaces: bool
    _order: SaveOrder | None = None
    _others: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.location.url

    async def prepare(self, save: SaveOrder) -> None:
        await self._check_newest(save)  # on object storage an export deletes the earlier one when it begins
        self._others = await read_sources(self.export.files, timeout_s=current_deadline().remaining_s())

    def read(self, snapshot: SnapshotReader[Any], save: SaveOrder, stop: Stop) -> ConvertReport:
        plan: SavePlan = snapshot.plan(stop)
        candidates = [_Candidate(*one) for one in plan.named_tensors()]
        candidates += [_Candidate(fqn, dtype, shape, fqn, kind) for fqn, dtype, shape, kind in plan.named_composites()]
        chosen = _choose(self.export, candidates, self.url)
        items = {fqn: item for fqn, _, _, item in plan.named_tensors()}
        by_item = {items[chosen.origin[one.fqn]]: one for one in chosen.tensors}
        # In the order in which the snapshot has them, so that a file is written while the state is staged, and a window
        # is kept for no longer than one part needs it. A tensor whose size would leave those behind it unaligned goes
        # to the end of its file, and is copied until then; too many of them end the reading of the snapshot.
        tensors = [by_item[item] for item in sorted(by_item)]
        laid, index = safetensors_layout(tensors, None, self.export.max_shard_bytes, chosen.aliases)
        if any(sum(one.nbytes for one in file.late) > _MOST_HELD_BYTES for file in laid):
            raise SnapshotLostError(f"{self.url}: too many tensors have to be kept back for the end of their file")
        dtypes = {one.fqn: one.dtype for one in candidates}
        sources = {one.fqn: dtypes[chosen.origin[one.fqn]] for one in tensors}
        stream = _Stream(_pieces(snapshot, plan, by_item, sources, stop))
        bodies = [(file.name, stream.file(file)) for file in laid]
        others, last = ([(name, BytesBody(one)) for name, one in small.items()] for small in (self._others, index))
        files: list[tuple[str, Body]] = [*others, *bodies, *last]  # the last file is the one that readers look for
        order = SaveOrder(
            self.location,
            self.durability,
            current_deadline(),
            kind="files",
            verb="export",
            replaces_export=self.replaces,
            before_commit=partial(self._check_newest, save),
        )
        self._order = order
        order.lifecycle.started()
        order.lifecycle.planned(order.save_id)
        # The checkpoint comes first on a disk that is too small: its bytes are counted before the export asks for room.
        save.space.expect(save.transaction, plan.nbytes)
        try:
            save.space.take(order.transaction, sum(body.nbytes for _, body in files))
            order.transaction.write(files, stop=stop)
        finally:
            stream.close()
        report = self._report({name: body.nbytes for name, body in files}, chosen)
        order.lifecycle.written(report.nbytes)
        return report

    async def finish(self, read: ConvertReport) -> ConvertReport:
        order = self._order
        assert order is not None
        # Right before the commit, and again after the one in ``prepare``: a newer generation of the step may have been
        # exported meanwhile, and must not be replaced by this one.
        await order.before_commit()
        try:
            await order.transaction.commit({})
        finally:
            await order.remove_replaced()
        order.lifecycle.mark("committed")
        order.lifecycle.committed(read.nbytes, MappingProxyType(dict(order.lifecycle.seconds)))
        return read

    async def undo(self, error: BaseException) -> None:
        order = self._order
        if order is not None:
            # For observers the first try was skipped, and did not fail: the export is made from the checkpoint.
            starts_over = isinstance(error, SnapshotLostError)
            order.lifecycle.failed(SkippedError(str(error)) if starts_over else error, order.outcome)
            await order.transaction.clean_up(error)
            self._order = None

    def leave(self, *, stuck: bool) -> None:
        order = self._order
        if order is not None:
            try:
                order.transaction.settle(stuck=stuck)
            finally:
                order.lifecycle.failed(SaveAbortedError("the event loop has ended"), order.outcome)

    async def read_checkpoint(self, save: SaveOrder, ranks: Operation | None) -> ConvertReport:
        try:
            return await self._read_checkpoint(save, ranks)
        except (CheckpointNotFoundError, CorruptCheckpointError, RankFailuresError) as error:
            # The reader found files missing or altered. If the checkpoint of this save is not there any more, that is
            # the cause, and the error says so. Otherwise the files are damaged.
            kinds = {one.kind for one in error.failures} if isinstance(error, RankFailuresError) else set()
            if kinds <= _GONE and not await holds(save.location, save.save_id):
                raise self._gone(save) from error
            raise

    def _gone(self, save: SaveOrder) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"nothing was exported to {self.url}: the checkpoint of this save is not at {save.location.url} any more, "
            "because it was removed, or another save has replaced it. Save to a name of its own, or convert() the "
            "checkpoint that is there now"
        )

    async def _open(self, save: SaveOrder) -> Source:
        opened = await open_source_at(save.location)
        if opened.manifest.save_id != save.save_id:
            await opened.aclose()
            raise self._gone(save)
        return opened

    async def _check_newest(self, save: SaveOrder) -> None:
        """Raise ``SkippedError`` if this export would replace that of a newer generation: if its step has been saved
        again, by any process, and that save is committed."""
        if not self.replaces:
            return
        store = save.location.store
        for found in await io_threads().run(Step.among, await store.directories()):
            newer = found.step == save.step and found.generation > save.generation
            if newer and await found.current(store) is not None:
                raise SkippedError(
                    f"{self.url} was not written: step {save.step} was saved again meanwhile ({found.name})"
                )

    async def _read_checkpoint(self, save: SaveOrder, ranks: Operation | None) -> ConvertReport:
        opened = await prepare_together(ranks, partial(self._open, save))
        async with aclosing(opened):
            # In one step: a rank that is cancelled between two steps would not tell the others.
            selection = await prepare_together(ranks, partial(io_threads().run, self._choose_from, opened))
            options = ConvertOptions(max_shard_bytes=self.export.max_shard_bytes, durability=self.durability)
            how = How(
                options,
                "safetensors",
                verb="export",
                replaces=self.replaces,
                before_commit=partial(self._check_newest, save),
                others=self._others,
            )
            return await convert_opened(opened, selection, self.location, how, ranks)

    def _choose_from(self, opened: Source) -> Selection:
        """Select tensors of a checkpoint, as ``_choose`` does."""
        parts = opened.parts()
        candidates = [
            _Candidate(fqn, one.entry.dtype, one.entry.shape, one.identity)
            for fqn, one in opened.tensors.items()
            if fqn not in parts
        ]
        candidates += [
            _Candidate(fqn, one.dtype, one.shape, fqn, one.type)
            for fqn, one in opened.entries.items()
            if isinstance(one, CompositeEntry) and fqn not in parts
        ]
        return _choose(self.export, candidates, self.url)

    def _report(self, files: Mapping[str, int], chosen: Selection) -> ConvertReport:
        return ConvertReport(
            url=self.url,
            format="safetensors",
            files=tuple(files),
            nbytes=sum(files.values()),
            tensors=chosen.wholes,
            values=(),
            left_out=chosen.left_out,
            cast=chosen.cast,
            unverified=(),
        )


# --- from the snapshot ---


class _Piece(NamedTuple):
    """The next elements of a tensor, which are converted to ``dtype`` when they are copied."""

    name: str
    elements: torch.Tensor
    dtype: torch.dtype


def _pieces(
    snapshot: SnapshotReader[SavePlan],
    plan: SavePlan,
    by_item: Mapping[Any, OutTensor],
    sources: Mapping[str, str],
    stop: Stop,
) -> Generator[_Piece]:
    """Yield the payloads of these items, window by window."""
    window_number = first_item = 0
    for layout in plan.shards:
        for window in layout.windows:
            with snapshot.window(window_number, stop) as view:  # also a window without exported tensors, to release it
                for number, at, nbytes, _ in layout.payloads_in(window):
                    one = by_item.get(first_item + number)
                    if one is not None:
                        yield _piece(one, sources[one.fqn], view[at : at + nbytes])
            window_number += 1
        first_item += len(layout.items)


def _piece(one: OutTensor, source: str, view: memoryview) -> _Piece:
    if source == one.dtype:
        return _Piece(one.fqn, torch.frombuffer(memory_behind(view), dtype=torch.uint8), torch.uint8)
    elements = torch.frombuffer(memory_behind(view), dtype=dtype_from_name(source))
    return _Piece(one.fqn, elements, dtype_from_name(one.dtype))


class _Stream:
    """The bytes of files, one after the other, made from pieces of tensors in the order of the snapshot."""

    def __init__(self, pieces: Generator[_Piece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()
        self._files: list[_StreamedFile] = []

    def file(self, laid: SafetensorsFile) -> _StreamedFile:
        file = _StreamedFile(laid.nbytes, self._content(laid), self._lock)
        self._files.append(file)
        return file

    def close(self) -> None:
        """Release the window of the last piece. The files must not be read after that."""
        with self._lock:
            for file in self._files:
                file.close()
            self._pieces.close()

    def _content(self, laid: SafetensorsFile) -> Generator[_Piece]:
        """Yield the pieces of a file. Pieces that belong at its end are copied and kept until then."""
        yield _bytes_of(laid.header)
        held: dict[str, list[_Piece]] = {one.fqn: [] for one in laid.late}
        left = sum(one.nbytes for one in laid.tensors)
        while left:
            # Pieces arrive in the order of the snapshot, and one at a time: all threads that write parts take them
            # under one lock. Dropping the piece before the next one is asked for lets the snapshot release the window.
            piece = next(self._pieces)
            left -= piece.elements.numel() * piece.dtype.itemsize
            if piece.name in held:
                held[piece.name].append(piece._replace(elements=piece.elements.to(piece.dtype, copy=True)))
            else:
                yield piece
            del piece
        for pieces in held.values():
            yield from pieces


def _bytes_of(content: bytes) -> _Piece:
    return _Piece("", torch.frombuffer(bytearray(content), dtype=torch.uint8), torch.uint8)


class _StreamedFile:
    """A ``Body`` whose parts are made in their order. A thread that needs a part makes all parts before it."""

    aligned = False

    def __init__(self, nbytes: int, content: Generator[_Piece], lock: threading.Lock) -> None:
        self.nbytes = nbytes
        self._content = content
        self._lock = lock
        self._left: _Piece | None = None
        self._error: BaseException | None = None
        self._made: dict[int, memoryview] = {}
        self.parts: Sequence[_Part] = [
            _Part(self, number, start, min(_PART_BYTES, nbytes - start))
            for number, start in enumerate(range(0, nbytes, _PART_BYTES))
        ]
        self._next = 0

    def take(self, number: int, stop: Stop) -> memoryview:
        with self._lock:
            stop.check()
            # The parts of a file have to be made in order, because the snapshot is read once. A thread that needs a
            # later part makes those before it, and leaves them for the others.
            while self._next <= number:
                if self._error is not None:  # the thread that met it may not have set ``stop`` yet
                    raise self._error
                try:
                    self._make_next()
                except BaseException as error:
                    self._error = without_frames(error)
                    raise
            return self._made.pop(number)

    def _make_next(self) -> None:
        part = self.parts[self._next]
        with allocating("memory for a part of an export"):
            memory = MemoryMap(-1, part.nbytes)
        self._fill(memory, part.nbytes)
        self._made[self._next] = memoryview(memory)
        self._next += 1

    def close(self) -> None:
        """Drop the pieces that refer to staged memory. Parts and files refer to each other, so they are freed late."""
        self._content.close()
        self._left = self._error = None
        self._made.clear()

    def _fill(self, memory: MemoryMap, nbytes: int) -> None:
        """Fill a part with the next pieces. Torch copies without the GIL. The copies are aligned, because payloads are
        aligned in the file and parts begin at multiples of 8."""
        done = 0
        while done < nbytes:
            piece = self._left if self._left is not None else next(self._content)
            size = piece.dtype.itemsize
            count = min(piece.elements.numel(), (nbytes - done) // size)
            torch.frombuffer(memory, dtype=piece.dtype, count=count, offset=done).copy_(piece.elements[:count])
            done += count * size
            rest = piece.elements[count:]
            self._left = piece._replace(elements=rest) if rest.numel() else None
            del piece, rest


@dataclass(frozen=True, slots=True)
class _Part:
    file: _StreamedFile
    number: int
    offset: int
    nbytes: int

    def take(self, stop: Stop) -> memoryview:
        return self.file.take(self.number, stop)

    def release(self) -> None:
        """Do nothing: the memory is freed with the last view of it."""
