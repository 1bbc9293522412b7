"""``convert``: writes a checkpoint of any readable format in any writable format."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .._engine.calls import in_operation
from .._foreign.manifests import TORCH_SUFFIXES
from .._format.records import (
    EmptyEntry,
    Manifest,
    Node,
)
from .._format.safetensors import INDEX_NAME, SUFFIX
from .._group import Operation, prepare_together, stoppable
from .._load.open.manifest import from_one_checkpoint
from .._runtime.public import public
from .._runtime.tasks import running_loop
from .._runtime.threads import Deadline, Stop, collected, current_deadline, io_threads, time_limit, write_threads
from .._save.group import Group
from .._save.layouts import commit_files
from .._save.operation import RankReceipt
from .._save.running import Save, SaveOrder
from .._save.task import run_here
from .._storage import Location, RangeSource, Transaction, locate_by_caller
from ..errors import (
    InvalidOptionError,
    RankFailuresError,
)
from ..options import (
    ConvertOptions,
    Dtypes,
    Format,
    Names,
    Outcome,
    Storage,
    check_choice,
    check_dtype,
    check_names,
    options_of,
)
from .selection import Selection, select_from
from .source import Pipeline, Source, source_of, window_bytes_within
from .targets import (
    DcpTarget,
    OutValue,
    TargetFile,
    safetensors_files,
    torch_file,
)

__all__ = [
    "ConvertReport",
    "ConvertRequest",
    "Format",
    "convert",
    "convert_opened",
]


@public
@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The result of a conversion or an export.

    Attributes:
        url: The target.
        format: The format that was written.
        files: The names of the files.
        nbytes: The bytes of all files together.
        tensors: The names of the tensors in the target.
        values: The names of the plain values in the target.
        left_out: Names in the source that ``select`` or ``names`` left out, and sidecar files for which the target has
            no place.
        cast: The names in the target of tensors that were converted to another dtype.
        unverified: The names of entries of which some bytes had no checksum in the source.
    """

    url: str
    format: Format
    files: tuple[str, ...]
    nbytes: int
    tensors: tuple[str, ...]
    values: tuple[str, ...]
    left_out: tuple[str, ...]
    cast: tuple[str, ...]
    unverified: tuple[str, ...]


@public
async def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002  # the usual name
    select: str | Collection[str] | None = None,
    names: Names | None = None,
    dtype: Dtypes | None = None,
    options: ConvertOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    target_storage_options: Mapping[str, Any] | None = None,
    target_storage: Storage | None = None,
) -> ConvertReport:
    """Write the tensors and values of ``source`` to the new ``target``, in the same or another format.

    When it returns, ``target`` is visible as a whole and, with ``durability="fsync"``, durable. Everything is read as
    data, and nothing is unpickled. It passes through a bounded amount of memory. On object storage each file appears
    when it is complete, and the index of a directory of safetensors comes last; a file that is larger than a part
    (``StorePolicy.part_bytes``) is not created conditionally there, so of two conversions to one name at the same time
    one may replace the other's.

    After an error or a cancel nothing is visible, and what was written has been removed.

    Args:
        source: A checkpoint of sidestream or of stock DCP, a file of ``torch.save``, or a file or directory of
            safetensors.
        target: A new file or directory.
        format: What is written (``options.Format``). None: names that end in ``.safetensors``, ``.pt``, ``.pth`` or
            ``.bin`` are files of that kind, all others a directory for DCP.
        select: Patterns of names in the source (``"model.*"``). A list of which elements before others are left out
            becomes a dict by index. None: everything.
        names: The name in the target of each name in the selection (``options.Names``). None leaves an entry out.
        dtype: What floating-point tensors are converted to, or patterns of names in the target and what those are
            converted to (``options.Dtypes``).
        options: How it is done: size of files, memory, verification, durability, limits. None: ``ConvertOptions()``.
        storage_options: What the fsspec file system of ``source`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``source`` is reached.
        target_storage_options: As ``storage_options``, for ``target``.
        target_storage: How the storage at ``target`` is reached.

    Returns:
        What was written, and what was left out.

    Raises:
        InvalidOptionError, MissingExtraError: The call is wrong, or plain values are to be written to safetensors,
            which cannot hold them.
        CheckpointNotFoundError: There is no checkpoint at ``source``, or it was replaced again and again.
        CheckpointExistsError: There is something at ``target``.
        MissingKeysError: A pattern matches nothing.
        KeyCollisionError: Two entries would have one name.
        UnsupportedCheckpointError, UnsupportedTensorError: This version does not read or write tensors of a kind that
            was selected.
        UnsafeObjectError: A value of another writer is more than data.
        CorruptCheckpointError: Bytes of ``source`` are missing or altered.
        NoSpaceError, AccessDeniedError, StorageError, DeadlineExceededError, OutOfMemoryError: The storage, the time or
            the memory did not suffice.
        NotDurableError: ``target`` is visible, but a sync failed.
        OutcomeUnknownError: The commit was sent, and its result could not be read back.
    """
    running_loop("convert")
    chosen = _format(target, format)
    check_names(names)
    check_dtype(dtype)
    options = options_of(options, ConvertOptions)
    where = await locate_by_caller(target, target_storage_options, target_storage, "target_")
    location = await locate_by_caller(source, storage_options, storage)

    async def converted(files: RangeSource, manifest: Manifest) -> ConvertReport:
        opened = await source_of(files, location.url, manifest)
        selection = await io_threads().run(select_from, opened, select, names, dtype, chosen)
        return await convert_opened(opened, selection, where, ConvertRequest(options, chosen))

    async def work() -> ConvertReport:
        with time_limit(Deadline.after(options.timeout_s)):
            return await from_one_checkpoint(location, converted)

    return await in_operation(work, "convert")


async def _unchecked() -> None:
    """Do nothing: nothing prevents the commit."""


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    options: ConvertOptions
    format: Format
    verb: Literal["export", "convert"] = "convert"
    replaces: bool = False
    """Whether an export replaces an earlier one."""
    before_commit: Callable[[], Awaitable[None]] = _unchecked
    """Called by the process that commits, when everything has been written. If it raises, nothing is committed."""
    others: Mapping[str, bytes] = field(default_factory=dict)
    """Files in addition to those of safetensors."""


async def convert_opened(
    opened: Source, selection: Selection, where: Location, request: ConvertRequest, ranks: Operation | None = None
) -> ConvertReport:
    """Convert the selection of an opened source. With ``ranks``, all ranks do it together, and each writes some of the
    files."""
    with opened.all_there():
        return await _convert(opened, selection, where, request, ranks)


async def _convert(
    opened: Source, selection: Selection, where: Location, request: ConvertRequest, ranks: Operation | None
) -> ConvertReport:
    chosen = request.format
    single = chosen == "torch" or (chosen == "safetensors" and where.name.endswith(SUFFIX))
    name = where.name if single else None
    sidecars = {} if single or request.verb == "export" else await opened.contents(request.options.verify)
    if chosen == "safetensors":
        sidecars = {name: one for name, one in sidecars.items() if not name.endswith(SUFFIX) and name != INDEX_NAME}
        request = replace(request, others={**sidecars, **request.others})

    async def prepare() -> tuple[Sequence[TargetFile] | DcpTarget, Pipeline]:
        nodes = await opened.nodes(await io_threads().run(selection.stored_values))
        files = await io_threads().run(_plan, selection, nodes, name, request)
        total = await io_threads().run(selection.nbytes)
        pipeline = Pipeline(opened, selection.origin, request.options.verify, request.options.progress, total)
        # Before the attempt is made: damage that can be found without reading payloads leaves nothing behind.
        if request.options.verify == "always":
            await pipeline.check()
        return files, pipeline

    # Each rank plans all files from the same checkpoint. That is cheaper than to send a plan, and rank 0 compares a
    # digest of the plans before it makes the attempt.
    files, pipeline = await prepare_together(ranks, prepare)
    beside = sidecars if isinstance(files, DcpTarget) else {}
    to_files = export_kind(where, request.replaces)
    if single and to_files == "files":
        to_files = "file"
    save = Save(
        where,
        current_deadline(),
        SaveOrder(durability=request.options.durability, files=beside, verb=request.verb),
        kind="directory" if isinstance(files, DcpTarget) else to_files,
        replaces_export=request.replaces,
        operation=ranks,
    )
    layout = _ConvertedLayout(save, files, selection)
    sizes = {file.name: file.nbytes for file in layout.data_files}

    async def write() -> None:
        await save.begin(sum(sizes.values()))
        await pipeline.write(layout.data_files, save.transaction)
        await request.before_commit()

    # Two ways to the same commit. Alone: this process writes all files. With other ranks: each writes some, and rank 0
    # commits when all have.
    if ranks is None:
        await run_here(save, write, layout)
    else:
        sizes = await _run_divided(save, layout.data_files, pipeline, selection, request)

    def report() -> ConvertReport:
        return ConvertReport(
            url=where.url,
            format=chosen,
            files=tuple(sizes),
            nbytes=sum(sizes.values()),
            tensors=selection.wholes,
            values=tuple(selection.values),
            left_out=(*selection.left_out, *_without_place(opened, sidecars, request)),
            cast=selection.cast,
            unverified=tuple(sorted(new for new, old in selection.origin.items() if old in opened.unverified)),
        )

    return await io_threads().run(report)


def export_kind(where: Location, replaces: bool) -> Literal["file", "files", "replacement"]:
    """Return the kind of the attempt of an export to ``where``. An export that ``replaces`` an existing one does so as
    a whole where directories can be exchanged. Elsewhere the files keep the names that other programs look for, so the
    old ones are deleted first, or, on a marked mount, the export is refused."""
    return "replacement" if replaces and where.store.capabilities.rename else "files"


# --- the files ------------------------------------------------------------------------------------------------------


def _plan(
    selection: Selection, nodes: Mapping[str, Node], name: str | None, request: ConvertRequest
) -> Sequence[TargetFile] | DcpTarget:
    """Plan the files. ``nodes`` are the values as data, by their names in the source."""
    window_bytes, shard_bytes = window_bytes_within(request.options.budget_bytes), request.options.max_shard_bytes
    tensors = selection.tensors
    values = collected(
        OutValue(fqn, path, None, empty=True) if isinstance(entry, EmptyEntry) else OutValue(fqn, path, nodes[old])
        for fqn, (path, old, entry) in selection.values.items()
    )
    if request.format == "dcp":
        return DcpTarget(tensors, values, selection.composites, shard_bytes or 1 << 62, window_bytes)
    if request.format == "torch":
        return [torch_file(name or "", tensors, values, selection.order, window_bytes)]
    return safetensors_files(tensors, name, shard_bytes, window_bytes, selection.aliases, request.others)


def _without_place(opened: Source, taken: Mapping[str, bytes], request: ConvertRequest) -> list[str]:
    """Return the sidecar files that are left out. An export has files of its own in their place."""
    return [] if request.verb == "export" else [name for name in opened.manifest.sidecars if name not in taken]


class _ConvertedLayout:
    """The layout of converted files. Only a checkpoint gets a manifest and a marker."""

    def __init__(self, save: Save, files: Sequence[TargetFile] | DcpTarget, selection: Selection) -> None:
        self._save = save
        self._dcp = files if isinstance(files, DcpTarget) else None
        self._selection = selection
        self.data_files = files.data_files if isinstance(files, DcpTarget) else files

    def receipt(self, plan: None, written: None, stop: Stop) -> RankReceipt:
        names = {file.name: self._save.transaction.committed_name(file.name) for file in self.data_files}
        crcs = {} if self._dcp is None else self._dcp.crcs(names)
        return RankReceipt({names[file.name]: file.nbytes for file in self.data_files}, names, crcs)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        if self._dcp is None:
            return {}
        (receipt,) = receipts
        entries = self._dcp.entries(self._selection.order, receipt.content)
        containers = self._selection.containers
        about = Manifest(
            self._save.save_id, entries, dict(receipt.files), file_crcs=receipt.crcs, containers=containers
        )
        manifest = self._save.with_sidecars(about)
        return {**self._save.sidecar_files(), **commit_files(manifest, self._save.order.saved_at)}


# --- with other ranks -------------------------------------------------------------------------------------------------
# Each rank writes some of the files into one attempt, which rank 0 commits.


async def _run_divided(
    save: Save, files: Sequence[TargetFile], pipeline: Pipeline, selection: Selection, request: ConvertRequest
) -> dict[str, int]:
    """Export with other ranks, and return the sizes of all files by their names."""
    ranks = save.operation
    assert ranks is not None
    tensors = [file for file in files if file.name.endswith(SUFFIX)]
    beside = [file for file in files if not file.name.endswith(SUFFIX)]
    divided = _DividedFiles(save, ranks, tensors, beside, files[-1].name, selection)
    nbytes = 0 if ranks.rank else sum(file.nbytes for file in files)

    async def write() -> None:
        await save.begin(nbytes)
        await divided.write(pipeline, save.transaction)

    await run_here(save, write, divided, _Divided(save, divided, request))
    return {**{file.name: file.nbytes for file in tensors}, **divided.others}


@dataclass(slots=True)
class _DividedFiles:
    """The files of an export. The ranks divide ``tensors`` among each other, and rank 0 writes those in ``beside``.
    ``others`` has the sizes of these; only rank 0 knows them before it sends them. The file ``final``, which readers
    look for, is written when the others are complete."""

    save: Save
    operation: Operation
    tensors: Sequence[TargetFile]
    beside: Sequence[TargetFile]
    final: str
    selection: Selection
    others: dict[str, int] = field(default_factory=dict)
    _written: dict[str, int] = field(default_factory=dict)

    async def write(self, pipeline: Pipeline, into: Transaction) -> None:
        """Write the files of this rank. Raises ``Stopped`` when another rank has failed."""
        operation = self.operation
        digest = await io_threads().run(_digest, self.tensors, self.selection)
        answer = await operation.aexchange("plan", digest, self._begin)
        self.others = json.loads(answer)
        ranks = _divided(self.tensors, operation.world)
        mine = [one for one, rank in zip(self.tensors, ranks, strict=True) if rank == operation.rank]
        if operation.rank == 0:
            mine.extend(self.beside)
        await stoppable(operation, pipeline.write([one for one in mine if one.name != self.final], into))
        # Two steps. The file that readers look for is written when the others of all ranks are complete, because on
        # object storage each file is visible as soon as it is written.
        await operation.agree("write")
        await stoppable(operation, pipeline.write([one for one in mine if one.name == self.final], into))
        self._written.update((one.name, one.nbytes) for one in mine)

    # --- the layout: the files need no manifest ---

    def receipt(self, plan: None, written: None, stop: Stop) -> RankReceipt:
        return RankReceipt(self._written, None)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        return {}

    def pack(self, receipt: RankReceipt) -> bytes:
        return b""

    def unpack(self, rank: int, content: bytes) -> None:
        return None

    async def _begin(self, digests: Sequence[bytes]) -> bytes:
        """Make the attempt, if all ranks have the same export. Called on rank 0."""
        differs = [rank for rank, one in enumerate(digests) if one != digests[0]]
        if differs:
            raise InvalidOptionError(
                f"ranks that export together have to say the same: select=, names=, dtype= and max_shard_bytes= make "
                f"other files on rank {differs[0]} than on rank 0"
            )
        await write_threads().run(self.save.make_attempt)
        return json.dumps({one.name: one.nbytes for one in self.beside}).encode()


def _digest(files: Sequence[TargetFile], selection: Selection) -> bytes:
    """Return a digest of what the files contain. Called in a worker thread."""
    layout = [[one.name, one.nbytes] for one in files]
    tensors = collected([one.fqn, one.dtype, selection.origin[one.fqn]] for one in selection.tensors)
    content = [layout, tensors, selection.aliases]
    return hashlib.blake2b(json.dumps(content).encode(), digest_size=16).digest()


def _divided(files: Sequence[TargetFile], world: int) -> list[int]:
    """Return the rank that writes each file. The largest files come first, and each gets the rank with the least
    bytes."""
    load = [0] * world
    ranks = [0] * len(files)
    for number in sorted(range(len(files)), key=lambda one: (-files[one].nbytes, one)):
        rank = min(range(world), key=lambda one: (load[one], one))
        ranks[number] = rank
        load[rank] += files[number].nbytes
    return ranks


class _Divided(Group):
    """The coordinator of such an export. Rank 0 commits when all ranks have written their files. If one fails, all
    fail."""

    def __init__(self, save: Save, layout: _DividedFiles, request: ConvertRequest) -> None:
        super().__init__(save, layout)
        self._request = request

    async def before_commit(self) -> None:
        await self._request.before_commit()

    async def _read_back(self, verdict: RankFailuresError) -> None:
        """Delete the files that this rank has written, if they have their final names. The outcome is unknown if rank 0
        died during the commit, because an export has no marker."""
        first = verdict.failures[0]
        # Rank 0 may have committed, and an export has no marker that could tell. So nothing is deleted. In every other
        # case the files of this rank have to go, and where they have their final names only this rank knows which they
        # are.
        if first.rank == 0 and first.kind in ("RankDied", "DeadlineExceededError") and self._operation.step == "commit":
            self._save.transaction.outcome = "unknown"
        elif self._save.transaction.place is None:  # otherwise rank 0 deletes the hidden directory
            await self._save.clean_up(verdict)

    async def _seen(self) -> Outcome:
        return "unknown"


# --- the options ----------------------------------------------------------------------------------------------------


def _format(target: str | os.PathLike[str], chosen: Format | None) -> Format:
    if chosen is not None:
        check_choice("format", chosen, Format)
        return chosen
    text = str(target)
    if text.endswith(SUFFIX):
        return "safetensors"
    return "torch" if text.endswith(TORCH_SUFFIXES) else "dcp"
