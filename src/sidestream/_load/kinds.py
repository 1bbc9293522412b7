"""The entries of a checkpoint by kind, and their nesting in a state dict."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._format.records import (
    SPARSE_PARTS,
    CompositeEntry,
    Entries,
    Entry,
    Manifest,
    OpaqueEntry,
    Row,
    TensorEntry,
    ValueEntry,
    all_parts,
    path_of,
    stored,
)
from .._layout.assemble import assemble
from .._layout.names import new_dtypes, selected
from .._runtime.threads import pause_point
from ..options import (
    Dtypes,
)


@dataclass(frozen=True, slots=True)
class Kinds:
    """Entries by kind: tensors, plain values, tensors that consist of others, and tensors that cannot be read."""

    tensors: dict[str, TensorEntry | Row] = field(default_factory=dict)
    values: dict[str, ValueEntry] = field(default_factory=dict)
    composites: dict[str, CompositeEntry] = field(default_factory=dict)
    opaque: dict[str, OpaqueEntry] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Mapping[str, Entry]) -> Kinds:
        kinds = cls()
        for fqn, one in stored(entries).items():
            pause_point()
            if isinstance(one, (tuple, TensorEntry)):
                kinds.tensors[fqn] = one
            elif isinstance(one, ValueEntry):
                kinds.values[fqn] = one
            elif isinstance(one, CompositeEntry):
                kinds.composites[fqn] = one
            elif isinstance(one, OpaqueEntry):
                kinds.opaque[fqn] = one
        return kinds

    def converted(self, dtype: Dtypes, url: str) -> dict[str, str]:
        """Return the new dtypes of the tensors that are converted. Parts of composite tensors keep their dtype."""
        parts = all_parts(self.composites)
        looks = (
            (fqn, *(one[:2] if isinstance(one, tuple) else (one.dtype, one.shape))) for fqn, one in self.tensors.items()
        )
        return new_dtypes((look for look in looks if look[0] not in parts), dtype, url)


def nested(entries: Mapping[str, Entry], leaves: Mapping[str, Any], some: bool) -> dict[Any, Any]:
    """Return the state dict. ``some``: these are perhaps not all entries of the checkpoint, so a list may lack
    elements."""
    parts = all_parts(entries)
    named = ((path_of(one), leaves.get(fqn, {})) for fqn, one in stored(entries).items() if fqn not in parts)
    return assemble(named, gaps=some)


def indices_of(composites: Mapping[str, CompositeEntry]) -> set[str]:
    """Return the parts of sparse tensors that contain indices. These are not mapped, because they are checked once, and
    pages of a file can change after that."""
    sparse = ((fqn, one) for fqn, one in composites.items() if one.type in SPARSE_PARTS)
    return {f"{fqn}.{part}" for fqn, one in sparse for part in one.parts if part != "values"}


def chosen_of(manifest: Manifest, select: str | Collection[str], url: str) -> Entries:
    """Return the entries that ``select`` matches, with the parts of composite tensors."""
    entries = manifest.entries
    found, parts = manifest.stored, all_parts(entries)
    chosen: dict[str, Entry | Row] = {}
    for fqn in selected((fqn for fqn in entries if fqn not in parts), select, url):
        pause_point()
        chosen.update((name, found[name]) for name in (fqn, *manifest.parts_of(fqn)))
    return Entries(chosen)
