"""The tensors and values of a source that a conversion takes, and their new names, paths and dtypes."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .._format.records import (
    CompositeEntry,
    DictKey,
    EmptyEntry,
    Key,
    TensorEntry,
    ValueEntry,
    itemsize,
    name_problem,
)
from .._layout.names import consistent, new_dtypes, new_names, renamed_path, selected
from .._layout.objects import containers_of
from .._runtime.threads import collected, paced
from ..errors import (
    InvalidOptionError,
    KeyCollisionError,
    UnsupportedCheckpointError,
    UnsupportedTensorError,
)
from ..options import (
    Dtypes,
    Format,
    Names,
)
from .source import Source
from .targets import (
    OutTensor,
)

_FORMAT_NAMES = {"torch": "files of torch.save as this version writes them", "safetensors": "safetensors"}


@dataclass(frozen=True, slots=True)
class Selection:
    """The tensors and values to convert, with their new names.

    ``left_out`` are names in the source. ``order`` has the new names of all entries. ``origin`` has the name in the
    source of each tensor, and ``wholes`` are the tensors except parts of others. ``aliases`` maps names of tied tensors
    that are not written to the names with which they are written. ``composites`` are tensors that consist of others,
    which are among ``tensors``. ``values`` has path, name in the source, and entry of each value. ``containers`` are
    the types of dicts, as in the manifest.
    """

    left_out: tuple[str, ...]
    order: Sequence[str] = ()
    cast: tuple[str, ...] = ()
    wholes: tuple[str, ...] = ()
    tensors: list[OutTensor] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    composites: dict[str, CompositeEntry] = field(default_factory=dict)
    values: dict[str, tuple[tuple[Key, ...], str, ValueEntry | EmptyEntry]] = field(default_factory=dict)
    containers: dict[str, str] = field(default_factory=dict)

    def stored_values(self) -> dict[str, ValueEntry]:
        """Return the values that have to be read, by their names in the source. Called in a worker thread."""
        values = paced(self.values.values())
        return {fqn: entry for _, fqn, entry in values if isinstance(entry, ValueEntry)}

    def nbytes(self) -> int:
        """Return the bytes of the tensors, those of tied ones once. Called in a worker thread."""
        return sum(dict(collected((one.identity, one.nbytes) for one in self.tensors)).values())


def select_from(
    source: Source,
    select: str | Collection[str] | None,
    names: Names | None,
    dtype: Dtypes | None,
    target: Format,
) -> Selection:
    entries, parts = source.entries, source.parts()
    taken = selected((fqn for fqn in entries if fqn not in parts), select, source.url)
    named = new_names(names, taken, source.url, identity=lambda fqn: _identity(fqn, source))
    kept = [fqn for fqn in taken if named[fqn] is not None]
    _refuse_opaque(source, kept)
    if target != "dcp":
        _refuse_unusual(source, kept, target)
    paths = _paths(source, named)
    if names is not None or select is not None:
        paths = consistent(paths, source.url)
    named = _with_parts(source, named)
    order = list(dict.fromkeys(new for new in named.values() if new is not None))
    left_out = tuple(fqn for fqn in entries if fqn not in parts and named.get(fqn) is None)
    found = Selection(left_out, order)
    if names is None and source.manifest.containers:
        holders = {holder for fqn in paced(order) for holder in containers_of(fqn)}
        found.containers.update((fqn, kind) for fqn, kind in source.manifest.containers.items() if fqn in holders)
    tensors = (
        (new, entry.dtype, entry.shape)
        for fqn, new in named.items()
        if new is not None
        and fqn not in source.refused
        and fqn not in parts
        and isinstance(entry := entries[fqn], TensorEntry)
    )
    dtypes = new_dtypes(tensors, dtype, source.url)
    cast, wholes = [], []
    for fqn, new in paced(named.items()):
        entry = entries[fqn]
        if new is None or new in found.origin or fqn in source.refused:
            continue
        whole = parts.get(fqn, fqn)
        path = (*paths[named[whole] or ""], *entry.path[len(entries[whole].path) :])
        if problem := name_problem(new, path):
            raise InvalidOptionError(f"{source.url}: {problem}")
        if target == "dcp" and any(map(_is_infinite, path)):
            raise UnsupportedCheckpointError(
                f"{source.url}: {fqn}: a key that is not a finite number, which no manifest holds: leave it out with "
                "select=, or give it another name with names="
            )
        if isinstance(entry, ValueEntry | EmptyEntry):
            found.values[new] = path, fqn, entry
            continue
        wholes += [] if fqn in parts else [new]
        if isinstance(entry, CompositeEntry):
            found.composites[new] = replace(entry, path=path)
            continue
        saved = entry.dtype
        wanted = dtypes.get(new, saved)
        if wanted != saved:
            cast.append(new)
        nbytes = math.prod(entry.shape) * itemsize(wanted)
        identity = (source.tensors[fqn].identity, wanted)
        found.tensors.append(OutTensor(new, wanted, entry.shape, nbytes, path, identity))
        found.origin[new] = fqn
    if target == "safetensors":
        _refuse_values(found)
    return replace(found, cast=tuple(cast), wholes=tuple(wholes))


def _is_infinite(step: Key) -> bool:
    return isinstance(step, DictKey) and isinstance(step.value, float) and not math.isfinite(step.value)


def _paths(source: Source, named: Mapping[str, str | None]) -> dict[str, tuple[Key, ...]]:
    """Return the paths of the new names. If tied tensors have one name, it gets the path of the first one."""
    found: dict[str, tuple[Key, ...]] = {}
    for fqn, new in paced(named.items()):
        if new is not None and new not in found:
            found[new] = renamed_path(source.entries[fqn].path, fqn, new)
    return found


def _with_parts(source: Source, named: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return ``named`` with the names of parts, which begin with the name of their tensor. Raises
    ``KeyCollisionError``."""
    found: dict[str, str | None] = {}
    for fqn, new in paced(named.items()):
        found[fqn] = new
        found.update((part, new and new + part[len(fqn) :]) for part in source.manifest.parts_of(fqn))
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
        if isinstance(one, CompositeEntry):
            what = f"it is a {one.type}, and {_FORMAT_NAMES[target]} hold plain tensors only"
        elif isinstance(one, TensorEntry) and one.is_sub_byte:
            what = f"{_FORMAT_NAMES[target]} have no dtype {one.dtype}"
        else:
            continue
        raise UnsupportedTensorError(f"{fqn}: {what}; convert into a directory for DCP, or leave it out with select=")


def _refuse_values(selection: Selection) -> None:
    stored = [fqn for fqn, (_, _, entry) in selection.values.items() if isinstance(entry, ValueEntry)]
    if stored:
        listed = ", ".join(stored[:5])
        raise InvalidOptionError(
            f"safetensors files hold only tensors, and {listed} are values: leave them out with select="
        )


def _identity(fqn: str, source: Source) -> object:
    """Return a key that is equal for tied tensors only."""
    one = source.tensors.get(fqn)
    return fqn if one is None else (one.identity, one.entry.shape)


def _refuse_opaque(source: Source, taken: Sequence[str]) -> None:
    """Raise the error of the first tensor that cannot be read. Its message also names the others."""
    opaque = [fqn for fqn in taken if fqn in source.refused]
    if not opaque:
        return
    also = f" (so are {', '.join(opaque[1:6])}{', ...' if len(opaque) > 6 else ''})" if opaque[1:] else ""
    raise source.refused[opaque[0]].within(source.url, f"{also}; use a selection without it")
