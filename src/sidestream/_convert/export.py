"""``HF``: an export of a save for transformers, from the snapshot that is also the source of the checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any

from .._format.safetensors import INDEX_NAME, SUFFIX
from .._group import Operation, prepare_together
from .._layout.save_layout import SavePlan
from .._runtime.public import public
from .._runtime.threads import Stop, current_deadline, io_threads, report
from .._save.running import Save, SaveOrder
from .._save.task import run_here
from .._staging import SnapshotReader
from .._storage import ABANDONED_AFTER_S, Body, BytesBody, Location, is_plain_name, locate_directory, read_sources
from ..errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    InvalidOptionError,
    RankFailuresError,
    SkippedError,
    SnapshotLostError,
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
from .chosen import choose_saved, choose_staged
from .convert import ConvertReport, ConvertRequest, convert_opened, export_kind
from .selection import Selection
from .source import Source, holds, newer_generation, open_source
from .streamed import Stream, pieces_of
from .targets import safetensors_layout
from .windows import PlainFiles

_STEP = "{step}"
_GONE = frozenset(one.__name__ for one in (CheckpointNotFoundError, CorruptCheckpointError, FileNotFoundError))
"""The errors of a reader whose checkpoint is replaced or removed meanwhile."""
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
            await store.remove_directory(match[0], durability=durability, use="prune")

    def _at(self, step: int | None) -> Location:
        url = os.fspath(self.url).replace(_STEP, str(step))
        return locate_directory(url, storage_of(self.storage_options, self.storage))


@dataclass(slots=True)
class _Sink:
    """The export of one save. ``replaces``: it replaces an earlier export."""

    export: HF
    location: Location
    durability: Durability
    replaces: bool
    together = True
    _own: Save | None = None
    """The save of the export itself, from its first byte until ``finish`` or ``undo``."""
    _others: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.location.url

    async def prepare(self, save: Save) -> None:
        await self._check_newest(save)  # on object storage an export deletes the earlier one when it begins
        self._others = await read_sources(self.export.files, timeout_s=current_deadline().remaining_s())

    def read(self, snapshot: SnapshotReader[Any], save: Save, stop: Stop) -> ConvertReport:
        plan: SavePlan = snapshot.plan(stop)
        chosen, by_item = choose_staged(self.export, plan, self.url)
        # In the order in which the snapshot has them, so that a file is written while the state is staged, and a window
        # is kept for no longer than one part needs it. A tensor whose size would leave those behind it unaligned goes
        # to the end of its file, and is copied until then; too many of them end the reading of the snapshot.
        tensors = [by_item[item] for item in sorted(by_item)]  # in the order of the snapshot
        laid, index = safetensors_layout(tensors, None, self.export.max_shard_bytes, chosen.aliases)
        if any(sum(one.nbytes for one in file.late) > _MOST_HELD_BYTES for file in laid):
            raise SnapshotLostError(f"{self.url}: too many tensors have to be kept back for the end of their file")
        stream = Stream(pieces_of(snapshot, plan, by_item, stop))
        bodies = [(file.name, stream.file(file)) for file in laid]
        others, last = ([(name, BytesBody(one)) for name, one in small.items()] for small in (self._others, index))
        files: list[tuple[str, Body]] = [*others, *bodies, *last]  # the last file is the one that readers look for
        own = self._own = Save(
            self.location,
            current_deadline(),
            SaveOrder(durability=self.durability, verb="export"),
            kind=export_kind(self.location, self.replaces),
            replaces_export=self.replaces,
        )
        own.lifecycle.started()
        own.lifecycle.planned(own.save_id)
        # The checkpoint comes first on a disk that is too small: its bytes are counted before the export asks for room.
        save.space.expect(save.transaction, plan.nbytes)
        try:
            save.space.take(own.transaction, sum(body.nbytes for _, body in files))
            own.transaction.write(files, stop=stop)
        finally:
            stream.close()
        return self._report({name: body.nbytes for name, body in files}, chosen)

    async def finish(self, read: ConvertReport, save: Save) -> ConvertReport:
        own, self._own = self._own, None
        assert own is not None
        # Right before the commit, and again after the one in ``prepare``: a newer generation of the step may have been
        # exported meanwhile, and must not be replaced by this one.
        await run_here(own, partial(self._check_newest, save), PlainFiles({"": read.nbytes}))
        return read

    async def undo(self, error: BaseException) -> None:
        own, self._own = self._own, None
        if own is not None:
            # For observers the first try was skipped, and did not fail: the export is made from the checkpoint.
            starts_over = isinstance(error, SnapshotLostError)
            await report(own.lifecycle.failed, SkippedError(str(error)) if starts_over else error, own.outcome)
            await own.clean_up(error)

    async def read_checkpoint(self, save: Save, ranks: Operation | None) -> ConvertReport:
        try:
            return await self._read_checkpoint(save, ranks)
        except (CheckpointNotFoundError, CorruptCheckpointError, RankFailuresError) as error:
            # The reader found files missing or altered. If the checkpoint of this save is not there any more, that is
            # the cause, and the error says so. Otherwise the files are damaged.
            kinds = {one.kind for one in error.failures} if isinstance(error, RankFailuresError) else set()
            if kinds <= _GONE and not await holds(save.location, save.save_id):
                raise self._gone(save) from error
            raise

    def _gone(self, save: Save) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(
            f"nothing was exported to {self.url}: the checkpoint of this save is not at {save.location.url} any more, "
            "because it was removed, or another save has replaced it. Save to a name of its own, or convert() the "
            "checkpoint that is there now"
        )

    async def _open(self, save: Save) -> Source:
        opened = await open_source(save.location)
        if opened.manifest.save_id != save.save_id:
            await opened.aclose()
            raise self._gone(save)
        return opened

    async def _check_newest(self, save: Save) -> None:
        """Raise ``SkippedError`` if this export would replace that of a newer generation: if its step has been saved
        again, by any process, and that save is committed."""
        if not self.replaces:
            return
        store = save.location.store
        if (newer := await newer_generation(store, save.order.step, save.order.generation)) is not None:
            raise SkippedError(
                f"{self.url} was not written: step {save.order.step} was saved again meanwhile ({newer})"
            )

    async def _read_checkpoint(self, save: Save, ranks: Operation | None) -> ConvertReport:
        opened = await prepare_together(ranks, self._open, save)
        async with aclosing(opened):
            # In one step: a rank that is cancelled between two steps would not tell the others.
            selection = await prepare_together(ranks, io_threads().run, choose_saved, self.export, opened, self.url)
            options = ConvertOptions(max_shard_bytes=self.export.max_shard_bytes, durability=self.durability)
            request = ConvertRequest(
                options,
                "safetensors",
                verb="export",
                replaces=self.replaces,
                before_commit=partial(self._check_newest, save),
                others=self._others,
            )
            return await convert_opened(opened, selection, self.location, request, ranks)

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
