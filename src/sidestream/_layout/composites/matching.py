"""The comparison of composite tensors of a target with those of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..._format.records import (
    SPARSE_PARTS,
    CompositeEntry,
    EmptyEntry,
    Entry,
    Manifest,
    OpaqueEntry,
    TensorEntry,
    ValueEntry,
)
from ..._runtime.pauses import paced
from ...errors import KindMismatchError, ShapeMismatchError, StateMismatchError
from ..findings import Findings, dtype_fits
from ..flatten import CompositeLeaf, Leaf
from .entry import composite_entry, differences


def saved_composites(manifest: Manifest) -> tuple[frozenset[str], frozenset[str]]:
    """Return the FQNs of the composite tensors in the checkpoint, and those of their parts."""
    wholes: list[str] = []
    parts: list[str] = []
    for fqn, entry in paced(manifest.stored.items()):
        if type(entry) is CompositeEntry:
            wholes.append(fqn)
            parts += [f"{fqn}.{part}" for part in entry.parts]
    return frozenset(wholes), frozenset(parts)


@dataclass(slots=True)
class CompositeTargets:
    """The composite tensors of the target. The parts of ``wholes`` are read in place. The number of elements of
    ``sparse`` ones is known only when they have been read. Parts of tensors in ``skipped`` are ignored. ``saved`` are
    the composite tensors in the checkpoint. ``met`` are those of them that the target requests, also by a leaf of
    another kind."""

    manifest: Manifest
    findings: Findings
    saved: frozenset[str]
    wholes: dict[str, torch.Tensor] = field(default_factory=dict)
    sparse: list[Leaf] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)
    met: list[str] = field(default_factory=list)

    def take(self, leaf: Leaf, *, compare: bool) -> bool:
        """Match ``leaf`` if it belongs to a composite tensor. Returns False if the caller has to match it. ``compare``:
        differences are findings. Without it, a tensor that differs is made anew."""
        fqn, value = leaf.fqn, leaf.value
        # A tensor comes before its parts, so what was decided for it holds for them. Parts of parts are skipped with
        # their own whole.
        if leaf.whole in self.skipped:
            self.skipped.add(fqn)
            return True
        if fqn in self.saved:
            self.met.append(fqn)
        if not isinstance(value, CompositeLeaf):
            return False
        assert value.tensor is not None
        if not self._fits(leaf, value, self.manifest.entries.get(fqn), compare):
            self.skipped.add(fqn)
        # How many elements a sparse tensor has is part of what was saved. So its parts cannot be read into those of the
        # target: they are read into new memory, and the tensor gets them at the end.
        elif value.form.type in SPARSE_PARTS:
            self.sparse.append(leaf)
            self.skipped.add(fqn)
        else:
            self.wholes[fqn] = value.tensor
        return True

    def _fits(self, leaf: Leaf, value: CompositeLeaf, entry: Entry | None, compare: bool) -> bool:
        fqn, findings = leaf.fqn, self.findings
        here = composite_entry(fqn, leaf.path, value.form)
        if not compare:
            if not isinstance(entry, CompositeEntry) or (here.type, here.shape) != (entry.type, entry.shape):
                return False
            return not differences(here, entry) and dtype_fits(fqn, here.dtype, entry.dtype, findings)
        if entry is None:
            findings.add_missing(fqn)
        elif isinstance(entry, OpaqueEntry):
            findings.opaque.append(fqn)
        elif not isinstance(entry, CompositeEntry) or entry.type != here.type:
            findings.add(KindMismatchError, f"{fqn}: a {here.type} in the target, {kind_of(entry)} in the checkpoint")
        elif entry.shape != here.shape:
            findings.add(ShapeMismatchError, f"{fqn}: shape {here.shape} in the target, {entry.shape} saved")
        elif problem := differences(here, entry):
            findings.add(StateMismatchError, f"{fqn}: {problem}")
        else:
            return dtype_fits(fqn, here.dtype, entry.dtype, findings)
        return False


def kind_of(entry: Entry) -> str:
    if isinstance(entry, CompositeEntry):
        return f"a {entry.type}"
    kinds = {TensorEntry: "a plain tensor", ValueEntry: "a plain value", EmptyEntry: "an empty dict"}
    return kinds[type(entry)]
