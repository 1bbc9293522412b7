"""``convert``: writes a checkpoint of any readable format in any writable format."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from .._format.records import (
    SUB_BYTE_DTYPES,
    CompositeEntry,
    Key,
    Manifest,
    Node,
    ValueEntry,
    itemsize,
    name_problem,
)
from .._format.safetensors.read import INDEX_NAME, SUFFIX
from .._group import Operation, prepare_together
from .._layout.names import consistent, new_names, renamed_path, selected, target_dtypes
from .._layout.ranges import PIECE_BYTES
from .._load.foreign.manifests import TORCH_SUFFIXES
from .._runtime.public import public
from .._runtime.tasks import running_loop
from .._runtime.threads import (
    Deadline,
    current_deadline,
    gathered,
    io_threads,
    run_sliced,
    time_limit,
    yielding_gil,
)
from .._save.layouts import commit_files, sidecar_files, with_sidecars
from .._save.operation import RankReceipt, SaveOrder
from .._storage import Kind, Location, locate_directory
from ..errors import InvalidOptionError, KeyCollisionError, UnsupportedTensorError
from ..options import (
    ConvertOptions,
    Dtypes,
    Durability,
    Format,
    Names,
    Progress,
    Storage,
    Verify,
    check_choice,
    check_dtype,
    check_names,
    options_of,
    storage_of,
)
from .divided import Divided, DividedFiles
from .operation import run_here
from .source import Pipeline, Source, SourceComposite, SourceEntry, SourceOpaque, SourceTensor, open_source
from .targets import (
    DcpTarget,
    OutTensor,
    OutValue,
    TargetFile,
    safetensors_files,
    torch_file,
)
from .windows import WINDOWS

__all__ = [
    "ConvertReport",
    "Format",
    "How",
    "Selection",
    "convert",
    "convert_opened",
]

_SPOKEN = {"torch": "files of torch.save as this version writes them", "safetensors": "safetensors"}
_MIB = 1 << 20


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
        CheckpointNotFoundError: There is no checkpoint at ``source``.
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
    where = locate_directory(target, storage_of(target_storage_options, target_storage, "target_"))
    with time_limit(Deadline.after(options.timeout_s)):
        opened = await open_source(source, storage_of(storage_options, storage))
        async with aclosing(opened):
            selection = await io_threads().run(_select, opened, select, names, dtype, chosen)
            how = How(
                chosen,
                options.max_shard_bytes,
                options.budget_bytes,
                options.verify,
                options.durability,
                options.progress,
            )
            return await convert_opened(opened, selection, where, how)


@dataclass(frozen=True, slots=True)
class How:
    format: Format
    shard_bytes: int | None
    budget_bytes: int
    verify: Verify
    durability: Durability
    progress: Progress | None = None
    verb: Literal["export", "convert"] = "convert"
    replaces: bool = False
    """Whether an export replaces an earlier one."""
    others: Mapping[str, bytes] = field(default_factory=dict)
    """Files in addition to those of safetensors."""


async def convert_opened(
    opened: Source, selection: Selection, where: Location, how: How, ranks: Operation | None = None
) -> ConvertReport:
    """Convert the selection of an opened source. With ``ranks``, all ranks do it together, and each writes some of the
    files."""
    with opened.all_there():
        return await _convert(opened, selection, where, how, ranks)


async def _convert(
    opened: Source, selection: Selection, where: Location, how: How, ranks: Operation | None
) -> ConvertReport:
    chosen = how.format
    single = chosen == "torch" or (chosen == "safetensors" and where.name.endswith(SUFFIX))
    values = [value.fqn for value in selection.values if not value.empty] if chosen == "safetensors" else []
    if values:
        listed = ", ".join(values[:5])
        raise InvalidOptionError(
            f"safetensors files hold only tensors, and {listed} are values: leave them out with select="
        )
    name = where.name if single else None
    sidecars = {} if single or how.verb == "export" else await opened.contents(how.verify)
    if chosen == "safetensors":
        sidecars = {name: one for name, one in sidecars.items() if not name.endswith(SUFFIX) and name != INDEX_NAME}
        how = replace(how, others={**sidecars, **how.others})

    async def prepare() -> tuple[Sequence[TargetFile] | DcpTarget, Pipeline, object]:
        nodes = await opened.nodes(dict(selection.unread.values()))
        files = await io_threads().run(_plan, selection, nodes, name, how)
        total = await io_threads().run(_total, selection)
        pipeline = Pipeline(opened, selection.origin, how.verify, how.progress, total)
        if how.verify == "always":
            await pipeline.check()
        return files, pipeline, None if ranks is None else await io_threads().run(_terms, selection)

    files, pipeline, terms = await prepare_together(ranks, prepare)
    kind: Kind = "directory" if isinstance(files, DcpTarget) else "file" if single else "files"
    beside = sidecars if isinstance(files, DcpTarget) else {}
    order = SaveOrder(
        where,
        how.durability,
        current_deadline(),
        kind=kind,
        verb=how.verb,
        files=beside,
        operation=ranks,
        replaces_export=how.replaces,
    )
    layout = _ConvertedLayout(order, files, selection.order)
    sizes = {file.name: file.nbytes for file in layout.data_files}
    if ranks is None:
        await run_here(order, partial(pipeline.write, layout.data_files), layout, sum(sizes.values()))
    else:
        sizes = await _run_divided(order, layout.data_files, pipeline, ranks, terms)

    def report() -> ConvertReport:
        return ConvertReport(
            url=where.url,
            format=chosen,
            files=tuple(sizes),
            nbytes=sum(sizes.values()),
            tensors=tuple(fqn for fqn in selection.order if fqn in selection.wholes),
            values=tuple(one.fqn for one in selection.values),
            left_out=(*selection.left_out, *_without_place(opened, sidecars, how)),
            cast=selection.cast,
            unverified=tuple(sorted(new for new, (old, _) in selection.origin.items() if old in opened.unverified)),
        )

    return await io_threads().run(report)


async def _run_divided(
    order: SaveOrder, files: Sequence[TargetFile], pipeline: Pipeline, ranks: Operation, terms: object
) -> dict[str, int]:
    """Export with other ranks, and return the sizes of all files by their names."""
    tensors = [file for file in files if file.name.endswith(SUFFIX)]
    beside = [file for file in files if not file.name.endswith(SUFFIX)]
    divided = DividedFiles(order, ranks, tensors, beside, files[-1].name, terms)
    nbytes = 0 if ranks.rank else sum(file.nbytes for file in files)
    await run_here(order, partial(divided.write, pipeline), divided, nbytes, Divided(order))
    return {**{file.name: file.nbytes for file in tensors}, **divided.others}


def _terms(selection: Selection) -> object:
    """Return what the files contain, to be compared with other ranks. Called in a worker thread."""
    tensors = gathered([one.fqn, one.dtype, selection.origin[one.fqn][0]] for one in selection.tensors)
    return [tensors, dict(selection.aliases)]


# --- the selection --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors and values to convert, with their new names. ``origin`` has the source of each tensor. ``aliases``
    maps names of tied tensors that are not written to the names with which they are written. ``composites`` are tensors
    that consist of others, which are among ``tensors``."""

    tensors: list[OutTensor]
    values: list[OutValue]
    origin: dict[str, tuple[str, SourceTensor]]
    order: list[str]
    left_out: tuple[str, ...]
    cast: tuple[str, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    composites: dict[str, CompositeEntry] = field(default_factory=dict)
    wholes: frozenset[str] = frozenset()
    """The new names of all tensors except parts of others."""
    unread: dict[str, tuple[str, ValueEntry]] = field(default_factory=dict)
    """The names in the source and the entries of the values that have not been read, by their new names."""


def _select(
    source: Source,
    select: str | Collection[str] | None,
    names: Names | None,
    dtype: Dtypes | None,
    target: Format,
) -> Selection:
    entries, parts = source.entries, source.parts()
    taken = run_sliced(selected((fqn for fqn in entries if fqn not in parts), select, source.url))
    named = run_sliced(new_names(names, taken, source.url, identity=lambda fqn: _identity(fqn, entries[fqn])))
    kept = [fqn for fqn in taken if named[fqn] is not None]
    _refuse_opaque(source, kept)
    if target != "dcp":
        _refuse_unusual(source, kept, target)
    paths = _paths(source, named)
    if names is not None or select is not None:
        paths = run_sliced(consistent(paths, source.url))
    named = _with_parts(source, named)
    order = list(dict.fromkeys(new for new in named.values() if new is not None))
    left_out = tuple(fqn for fqn in entries if fqn not in parts and named.get(fqn) is None)
    found = Selection([], [], {}, order, left_out, ())
    target_dtype = run_sliced(target_dtypes(dtype))
    cast, wholes = [], []
    for fqn, new in yielding_gil(named.items()):
        entry = entries[fqn]
        if new is None or new in found.origin or isinstance(entry, SourceOpaque):
            continue
        whole = parts.get(fqn, fqn)
        path = (*paths[named[whole] or ""], *entry.path[len(entries[whole].path) :])
        if problem := name_problem(new, path):
            raise InvalidOptionError(f"{source.url}: {problem}")
        if isinstance(entry, SourceComposite):
            found.composites[new] = replace(entry.entry, path=path)
            wholes += [] if fqn in parts else [new]
            continue
        if not isinstance(entry, SourceTensor):
            found.values.append(OutValue(new, path, None, empty=entry.entry is None))
            if entry.entry is not None:
                found.unread[new] = fqn, entry.entry
            continue
        saved = entry.entry.dtype
        wanted = saved if fqn in parts else target_dtype(new, saved)
        if wanted != saved:
            cast.append(new)
        nbytes = math.prod(entry.entry.shape) * itemsize(wanted)
        found.tensors.append(OutTensor(new, path, wanted, entry.entry.shape, nbytes, (entry.identity, wanted)))
        found.origin[new] = (fqn, entry)
        wholes += [] if fqn in parts else [new]
    return replace(found, cast=tuple(cast), wholes=frozenset(wholes))


def _paths(source: Source, named: Mapping[str, str | None]) -> dict[str, tuple[Key, ...]]:
    """Return the paths of the new names. If tied tensors have one name, it gets the path of the first one."""
    found: dict[str, tuple[Key, ...]] = {}
    for fqn, new in yielding_gil(named.items()):
        if new is not None and new not in found:
            found[new] = renamed_path(source.entries[fqn].path, fqn, new)
    return found


def _with_parts(source: Source, named: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return ``named`` with the names of parts, which begin with the name of their tensor. Raises
    ``KeyCollisionError``."""
    found: dict[str, str | None] = {}
    for fqn, new in yielding_gil(named.items()):
        found[fqn] = new
        entry = source.entries[fqn]
        if isinstance(entry, SourceComposite):
            found.update((part, new and new + part[len(fqn) :]) for part in entry.parts)
    whole = {new for new in named.values() if new is not None}
    for fqn, new in found.items():
        if fqn not in named and new in whole:
            raise KeyCollisionError(
                f"{source.url}: names= gives one name to {fqn}, a part of a tensor, and another entry: {new}"
            )
    return found


def _refuse_unusual(source: Source, taken: Sequence[str], target: Format) -> None:
    """Raise ``UnsupportedTensorError`` for a tensor that files of this format cannot hold."""
    for fqn in taken:
        one = source.entries[fqn]
        if isinstance(one, SourceComposite):
            what = f"it is a {one.entry.type}, and {_SPOKEN[target]} hold plain tensors only"
        elif isinstance(one, SourceTensor) and one.entry.dtype in SUB_BYTE_DTYPES:
            what = f"{_SPOKEN[target]} have no dtype {one.entry.dtype}"
        else:
            continue
        raise UnsupportedTensorError(f"{fqn}: {what}; convert into a directory for DCP, or leave it out with select=")


def _identity(fqn: str, entry: SourceEntry) -> object:
    """Return a key that is equal for tied tensors only."""
    return (entry.identity, entry.entry.shape) if isinstance(entry, SourceTensor) else fqn


def _refuse_opaque(source: Source, taken: Sequence[str]) -> None:
    """Raise the error of the first tensor that cannot be read. Its message also names the others."""
    opaque = [fqn for fqn in taken if isinstance(source.entries[fqn], SourceOpaque)]
    if not opaque:
        return
    first = source.entries[opaque[0]]
    assert isinstance(first, SourceOpaque)
    also = f" (so are {', '.join(opaque[1:6])}{', ...' if len(opaque) > 6 else ''})" if opaque[1:] else ""
    raise first.error.within(source.url, f"{also}; use a selection without it")


def _total(selection: Selection) -> int:
    distinct = dict(gathered((one.identity, one.nbytes) for one in selection.tensors))
    return sum(distinct.values())


# --- the files ------------------------------------------------------------------------------------------------------


def _plan(
    selection: Selection, nodes: Mapping[str, Node], name: str | None, how: How
) -> Sequence[TargetFile] | DcpTarget:
    """Plan the files. ``nodes`` are the values as data, by their names in the source."""
    window_bytes = min(64 * _MIB, (how.budget_bytes - WINDOWS * PIECE_BYTES) // WINDOWS) // _MIB * _MIB
    tensors, unread = selection.tensors, selection.unread
    values = gathered(
        replace(one, node=nodes[unread[one.fqn][0]]) if one.fqn in unread else one for one in selection.values
    )
    if how.format == "dcp":
        return DcpTarget(tensors, values, selection.composites, how.shard_bytes or 1 << 62, window_bytes)
    if how.format == "torch":
        return [torch_file(name or "", tensors, values, selection.order, window_bytes)]
    return safetensors_files(tensors, name, how.shard_bytes, window_bytes, selection.aliases, how.others)


def _without_place(opened: Source, taken: Mapping[str, bytes], how: How) -> list[str]:
    """Return the sidecar files that are left out. An export has files of its own in their place."""
    return [] if how.verb == "export" else [name for name in opened.manifest.sidecars if name not in taken]


class _ConvertedLayout:
    """The layout of converted files. Only a checkpoint gets a manifest and a marker."""

    def __init__(self, order: SaveOrder, files: Sequence[TargetFile] | DcpTarget, fqns: Sequence[str]) -> None:
        self._order = order
        self._dcp = files if isinstance(files, DcpTarget) else None
        self._fqns = fqns
        self.data_files = files.data_files if isinstance(files, DcpTarget) else files

    async def receipt(self, plan: None, written: None) -> RankReceipt:
        names = {file.name: self._order.transaction.committed_name(file.name) for file in self.data_files}
        crcs = {} if self._dcp is None else await io_threads().run(self._dcp.crcs, names)
        return RankReceipt({names[file.name]: file.nbytes for file in self.data_files}, names, crcs)

    def files(self, receipts: Sequence[RankReceipt]) -> dict[str, list[bytes]]:
        if self._dcp is None:
            return {}
        (receipt,) = receipts
        entries = self._dcp.entries(self._fqns, receipt.content)
        about = Manifest(self._order.save_id, entries, dict(receipt.files), file_crcs=receipt.crcs)
        manifest = with_sidecars(about, self._order)
        return {**sidecar_files(self._order), **commit_files(manifest, self._order.saved_at)}


# --- the options ----------------------------------------------------------------------------------------------------


def _format(target: str | os.PathLike[str], chosen: Format | None) -> Format:
    if chosen is not None:
        check_choice("format", chosen, Format)
        return chosen
    text = str(target)
    if text.endswith(SUFFIX):
        return "safetensors"
    return "torch" if text.endswith(TORCH_SUFFIXES) else "dcp"
