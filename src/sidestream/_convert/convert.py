"""``convert``: writes a checkpoint of any readable format in any writable format."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from .._format.records import SUB_BYTE_DTYPES, CompositeEntry, Key, Manifest, itemsize
from .._format.safetensors.read import INDEX_NAME, SUFFIX
from .._group import Operation
from .._layout.names import consistent, new_names, renamed_path, target_dtype
from .._layout.ranges import PIECE_BYTES
from .._layout.select import selected
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
    Dtypes,
    Durability,
    Names,
    Progress,
    Storage,
    Verify,
    check_choice,
    check_count,
    check_dtype,
    check_names,
    check_timeout,
    check_verify,
    storage_of,
)
from .divided import Divided, DividedFiles, as_one
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

Format = Literal["dcp", "torch", "safetensors"]
"""``"dcp"``: a checkpoint of ours, which stock DCP reads. ``"torch"``: one file, as ``torch.save`` writes it.
``"safetensors"``: one file, or a directory as transformers reads it."""

_SPOKEN = {"torch": "files of torch.save as this version writes them", "safetensors": "safetensors"}
_LEAST_BYTES = 96 << 20
_MIB = 1 << 20


@public
@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What was written: ``files`` by name, ``nbytes`` of them together, ``tensors`` and ``values`` by their new names.
    ``left_out`` are names of the source that ``select`` did not name or for which ``names`` gave None, and sidecar
    files (``files=`` of a save) for which the target has no place; ``cast`` is what was converted, and ``unverified``
    what the source had no checksum for."""

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
    shard_bytes: int | None = 5 << 30,
    budget_bytes: int = 256 << 20,
    verify: Verify = "always",
    durability: Durability = "fsync",
    progress: Progress | None = None,
    timeout_s: float = 3600.0,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
    target_storage_options: Mapping[str, Any] | None = None,
    target_storage: Storage | None = None,
) -> ConvertReport:
    """Write what is in ``source`` to the new ``target``, piece by piece; when this returns it is visible as a whole.

    ``source`` is a checkpoint of ours or of stock DCP, a file of ``torch.save``, or safetensors (a file or a
    directory); everything is read as data, and nothing unpickled. ``format`` follows from ``target`` if it is not
    given: ``.safetensors``, ``.pt``, ``.pth`` and ``.bin`` are files, everything else is a directory for DCP.

    ``select``: patterns (``"model.*"``) of what to take. ``names``: the name in the target of each
    name in the selection, as a function or a mapping (``Names``); None leaves the entry out.
    ``dtype``: what floating-point tensors become, or patterns of new names and what those become (``Dtypes``).
    ``shard_bytes``: where a directory of safetensors, or of DCP, goes on
    in the next file; None for one file. ``budget_bytes`` of memory at most are used for payloads, unless a single
    tensor cannot be read in pieces (compressed by stock DCP, saved by it with strides, or cut into columns): that one
    is held whole. ``verify`` as in ``load``; a source whose checksums cover whole tensors is read twice for it.
    ``storage_options`` or ``storage`` (as for ``save``) are for ``source``, those with ``target_`` for ``target``.

    On object storage a file appears when it is complete, and of a directory of safetensors the index comes last. A
    file that is larger than a part (``StorePolicy``) is not created conditionally there: of two conversions to one
    name at the same time, one may replace the other's.

    Raises what opening ``source`` raises; ``MissingKeysError`` if a pattern matches nothing;
    ``UnsupportedCheckpointError`` if the selection has a tensor of a kind that this version does not read;
    ``KeyCollisionError``; ``InvalidOptionError``, for safetensors also where the selection has plain values, which they
    cannot hold; ``UnsupportedTensorError``; ``CheckpointExistsError`` if ``target`` is there;
    ``CorruptCheckpointError``, ``StorageError``, ``DeadlineExceededError``: then nothing is visible, and what was
    written has been removed. The same holds for a cancel.
    """
    running_loop("convert")
    chosen = _format(target, format)
    check_names(names)
    _check_options(verify, durability, timeout_s, budget_bytes, shard_bytes, dtype)
    where = locate_directory(target, storage_of(target_storage_options, target_storage, "target_"))
    with time_limit(Deadline.after(timeout_s)):
        opened = await open_source(source, storage_of(storage_options, storage))
        async with aclosing(opened):
            selection = await io_threads().run(_select, opened, select, names, dtype, chosen)
            how = How(chosen, shard_bytes, budget_bytes, verify, durability, progress)
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

    async def prepare() -> tuple[Sequence[TargetFile] | DcpTarget, Pipeline]:
        files = await io_threads().run(_plan, selection, name, how)
        total = await io_threads().run(_total, selection)
        pipeline = Pipeline(opened, selection.origin, how.verify, how.progress, total)
        if how.verify == "always":
            await pipeline.check([piece for _, tensor in selection.origin.values() for piece in tensor.checks])
        return files, pipeline

    files, pipeline = await as_one(ranks, prepare)
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
        sizes = await _run_divided(order, layout.data_files, pipeline, ranks)

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
    order: SaveOrder, files: Sequence[TargetFile], pipeline: Pipeline, ranks: Operation
) -> dict[str, int]:
    """Export with other ranks, and return the sizes of all files by their names."""
    tensors = [file for file in files if file.name.endswith(SUFFIX)]
    last = [file for file in files if not file.name.endswith(SUFFIX)]
    origin = [[new, old] for new, (old, _) in pipeline.origin.items()]
    divided = DividedFiles(order, ranks, tensors, last, origin)
    nbytes = 0 if ranks.rank else sum(file.nbytes for file in files)
    await run_here(order, partial(divided.write, pipeline), divided, nbytes, Divided(order, ranks))
    return {**{file.name: file.nbytes for file in tensors}, **divided.others}


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


def _select(
    source: Source,
    select: str | Collection[str] | None,
    names: Names | None,
    dtype: Dtypes | None,
    target: Format,
) -> Selection:
    entries, parts = source.entries, source.parts()
    taken = selected((fqn for fqn in entries if fqn not in parts), select, source.url)
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
    cast, wholes = [], []
    for fqn, new in named.items():
        entry = entries[fqn]
        if new is None or new in found.origin or isinstance(entry, SourceOpaque):
            continue
        whole = parts.get(fqn, fqn)
        path = (*paths[named[whole] or ""], *entry.path[len(entries[whole].path) :])
        if isinstance(entry, SourceComposite):
            found.composites[new] = replace(entry.entry, path=path)
            wholes += [] if fqn in parts else [new]
            continue
        if not isinstance(entry, SourceTensor):
            found.values.append(OutValue(new, path, entry.node, entry.empty))
            continue
        saved = entry.entry.dtype
        wanted = saved if fqn in parts else target_dtype(new, saved, dtype)
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


def _plan(selection: Selection, name: str | None, how: How) -> Sequence[TargetFile] | DcpTarget:
    window_bytes = min(64 * _MIB, (how.budget_bytes - WINDOWS * PIECE_BYTES) // WINDOWS) // _MIB * _MIB
    tensors, values = selection.tensors, selection.values
    if how.format == "dcp":
        return DcpTarget(tensors, values, selection.composites, how.shard_bytes or 1 << 62, window_bytes)
    if how.format == "torch":
        return [torch_file(name or "", tensors, values, selection.order, window_bytes)]
    return safetensors_files(tensors, name, how.shard_bytes, window_bytes, selection.aliases, how.others)


def _without_place(opened: Source, taken: Mapping[str, bytes], how: How) -> list[str]:
    """Return the sidecar files that are left out. An export has files of its own in their place."""
    return [] if how.verb == "export" else [name for name in opened.sidecars if name not in taken]


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
        return {**sidecar_files(self._order), **commit_files(manifest)}


# --- the options ----------------------------------------------------------------------------------------------------


def _format(target: str | os.PathLike[str], chosen: Format | None) -> Format:
    if chosen is not None:
        check_choice("format", chosen, Format)
        return chosen
    text = str(target)
    if text.endswith(SUFFIX):
        return "safetensors"
    return "torch" if text.endswith(TORCH_SUFFIXES) else "dcp"


def _check_options(
    verify: Verify,
    durability: Durability,
    timeout_s: float,
    budget_bytes: int,
    shard_bytes: int | None,
    dtype: Dtypes | None,
) -> None:
    check_verify(verify)
    check_choice("durability", durability, Durability)
    check_timeout(timeout_s)
    check_count("budget_bytes", budget_bytes)
    if budget_bytes < _LEAST_BYTES:
        raise InvalidOptionError(f"budget_bytes={budget_bytes} has to be {_LEAST_BYTES} at least")
    if shard_bytes is not None:
        check_count("shard_bytes", shard_bytes)
    check_dtype(dtype)
