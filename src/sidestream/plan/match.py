"""A template (the state dict to load into) against a manifest: what to read where, or everything that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from .._torch import Stateful, check_tensor, dtype_name
from ..errors import DtypeMismatch, KindMismatch, Mismatch, MissingKeys, ShapeMismatch, UnexpectedKeys
from ..format.records import DictKey, EmptyEntry, Entry, Key, Manifest, TensorEntry, ValueEntry
from .flatten import Leaf, StatefulRoot, flatten

__all__ = ["LoadPlan", "StatefulLoad", "match", "plain_path"]

PlainPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class StatefulLoad:
    """``instance`` gets everything saved below ``depth`` keys of path; ``entries`` are those, by FQN.

    ``integer_keys`` are the (plain) paths of dicts in the instance's own state whose keys are integers: DCP's files
    have strings there.
    """

    instance: Stateful
    fqn: str
    versions: Any
    depth: int
    entries: Mapping[str, Entry]
    integer_keys: frozenset[PlainPath]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to read where.

    ``tensors``: FQN to the tensor that is overwritten in place, and ``leaders`` the first FQN of the same memory (tied
    tensors have one leader). ``new``: FQNs of tensors that have no place yet. ``values``: leaves whose holder gets a
    new value. ``not_asked_for``: keys of the checkpoint that are not read.
    """

    tensors: Mapping[str, torch.Tensor]
    leaders: Mapping[str, str]
    new: tuple[str, ...]
    values: tuple[tuple[Leaf, ValueEntry], ...]
    statefuls: tuple[StatefulLoad, ...]
    not_asked_for: tuple[str, ...]


@dataclass(slots=True)
class _Findings:
    """One list for each kind of offence, in the order in which they are told."""

    offenders: dict[type[Mismatch], list[str]] = field(default_factory=dict)

    def add(self, kind: type[Mismatch], line: str) -> None:
        self.offenders.setdefault(kind, []).append(line)

    def raise_if_any(self, url: str) -> None:
        if not self.offenders:
            return
        lines = [line for found in self.offenders.values() for line in found]
        kind = next(iter(self.offenders)) if len(self.offenders) == 1 else Mismatch
        shown = lines[:50] + ([f"... and {len(lines) - 50} more"] if len(lines) > 50 else [])
        text = "\n  ".join(shown)
        raise kind(f"the target does not fit the checkpoint at {url} (nothing was changed):\n  {text}", lines)


def plain_path(path: tuple[Key, ...]) -> PlainPath:
    """A path as DCP spells it: every dict key a string, list indices integers."""
    return tuple(str(key.value) if isinstance(key, DictKey) else key for key in path)


def match(state: Mapping[str, Any], manifest: Manifest, url: str) -> LoadPlan:
    """Flatten the template and find its leaves in the checkpoint.

    Raises a ``Mismatch`` that lists every missing or unexpected key and every tensor of another shape, dtype or kind.
    """
    leaves = flatten(state)
    findings = _Findings()
    roots = {leaf.value.number: leaf for leaf in leaves if isinstance(leaf.value, StatefulRoot)}
    tensors: dict[str, torch.Tensor] = {}
    values: list[tuple[Leaf, ValueEntry]] = []
    for leaf in leaves:
        if isinstance(leaf.value, StatefulRoot):
            continue
        entry = manifest.entries.get(leaf.fqn)
        if isinstance(leaf.value, torch.Tensor):
            if _tensor_fits(leaf, entry, findings):
                tensors[leaf.fqn] = leaf.value
        elif leaf.owner is None:
            _match_value(leaf, entry, manifest.own, values, findings)
    below = _claimed(manifest, roots, leaves)
    for number, root in roots.items():
        _match_stateful(root, [leaf for leaf in leaves if leaf.owner == number], below[number], manifest, findings)
    asked = {leaf.fqn for leaf in leaves} | {fqn for entries in below.values() for fqn in entries}
    top = {str(key) for key in state}
    rest = [fqn for fqn in manifest.entries if fqn not in asked]
    for fqn in rest:
        if str(plain_path(manifest.entries[fqn].path)[0]) in top:
            findings.add(UnexpectedKeys, f"{fqn}: in the checkpoint, not in the target")
    leaders = _tied(tensors, manifest, findings)
    findings.raise_if_any(url)
    statefuls = tuple(
        StatefulLoad(
            root.value.instance,
            root.fqn,
            root.value.versions,
            len(root.path),
            below[number],
            _integer_keys(leaves, number),
        )
        for number, root in roots.items()
    )
    new = [fqn for entries in below.values() for fqn, entry in entries.items() if isinstance(entry, TensorEntry)]
    return LoadPlan(
        tensors, leaders, tuple(fqn for fqn in new if fqn not in tensors), tuple(values), statefuls, tuple(rest)
    )


def _tensor_fits(leaf: Leaf, entry: Entry | None, findings: _Findings) -> bool:
    tensor = leaf.value
    check_tensor(tensor, leaf.fqn)
    if entry is None:
        findings.add(MissingKeys, f"{leaf.fqn}: in the target, not in the checkpoint")
    elif not isinstance(entry, TensorEntry):
        findings.add(KindMismatch, f"{leaf.fqn}: a tensor in the target, a plain value in the checkpoint")
    elif tuple(tensor.shape) != entry.shape:
        findings.add(ShapeMismatch, f"{leaf.fqn}: shape {tuple(tensor.shape)} in the target, {entry.shape} saved")
    elif dtype_name(tensor.dtype) != entry.dtype:
        findings.add(
            DtypeMismatch,
            f"{leaf.fqn}: dtype {dtype_name(tensor.dtype)} in the target, {entry.dtype} saved (never cast)",
        )
    elif any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        findings.add(Mismatch, f"{leaf.fqn}: expanded in the target (several elements share memory); clone() it")
    else:
        return True
    return False


def _tied(tensors: Mapping[str, torch.Tensor], manifest: Manifest, findings: _Findings) -> dict[str, str]:
    """The leader of each tensor. Tied ones must have been saved with the same bytes (of other writers that is only
    known when they are read); row-major ones that overlap otherwise would be read over each other."""
    first: dict[object, str] = {}
    leaders: dict[str, str] = {}
    extents: list[tuple[int, int, str]] = []
    for fqn, tensor in tensors.items():
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else fqn
        leaders[fqn] = leader = first.setdefault(view, fqn)
        if leader != fqn and manifest.own and _content(manifest.entries[fqn]) != _content(manifest.entries[leader]):
            findings.add(Mismatch, f"{fqn}: shares its memory with {leader}, but they were saved with different values")
        if leader == fqn and tensor.numel() and tensor.is_contiguous():
            extents.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, fqn))
    extents.sort()
    for (_, end, fqn), (start, _, other) in pairwise(extents):
        if start < end:
            findings.add(Mismatch, f"{other}: overlaps with {fqn} in the memory of the target; clone() one of them")
    return leaders


def _content(entry: Entry) -> object:
    assert isinstance(entry, TensorEntry)
    return [(chunk.offsets, chunk.sizes, chunk.crcs) for chunk in entry.chunks]


def _match_stateful(
    root: Leaf, leaves: list[Leaf], below: dict[str, Entry], manifest: Manifest, findings: _Findings
) -> None:
    """What must hold before an object is handed what is ``below`` it; the values it misses are its own affair."""
    empty = [leaf for leaf in leaves if type(leaf.value) is dict and not leaf.value]
    if not manifest.own:  # stock DCP has no entries for empty dicts; the object wants to see them all the same
        saved = {plain_path(entry.path)[:depth] for entry in below.values() for depth in range(len(entry.path) + 1)}
        below.update((leaf.fqn, EmptyEntry(leaf.path)) for leaf in empty if plain_path(leaf.path) not in saved)
    if not below:
        findings.add(MissingKeys, f"{root.fqn}: in the target, nothing of it in the checkpoint")
    instance = root.value.instance
    if isinstance(instance, torch.nn.Module) and type(instance).load_state_dict is torch.nn.Module.load_state_dict:
        known = {leaf.fqn for leaf in leaves}
        for fqn in below:
            if fqn not in known:
                findings.add(UnexpectedKeys, f"{fqn}: in the checkpoint, not in the module")


def _match_value(
    leaf: Leaf, entry: Entry | None, own: bool, values: list[tuple[Leaf, ValueEntry]], findings: _Findings
) -> None:
    """What a ``Stateful`` finds among its values is its own affair; only plain leaves come here."""
    empty = type(leaf.value) is dict and not leaf.value
    if entry is None:
        if own or not empty:  # stock DCP has no entry for an empty dict
            findings.add(MissingKeys, f"{leaf.fqn}: in the target, not in the checkpoint")
    elif isinstance(entry, ValueEntry) and not empty:
        if isinstance(leaf.holder, MutableMapping | list):
            values.append((leaf, entry))
        else:
            findings.add(Mismatch, f"{leaf.fqn}: its {type(leaf.holder).__name__} in the target cannot be changed")
    elif not (isinstance(entry, EmptyEntry) and empty):
        kinds = {TensorEntry: "a tensor", ValueEntry: "a plain value", EmptyEntry: "an empty dict"}
        here = "an empty dict" if empty else f"a {type(leaf.value).__name__}"
        findings.add(KindMismatch, f"{leaf.fqn}: {here} in the target, {kinds[type(entry)]} in the checkpoint")


def _claimed(manifest: Manifest, roots: Mapping[int, Leaf], leaves: list[Leaf]) -> dict[int, dict[str, Entry]]:
    """For each ``Stateful`` all entries saved below its path, and those of its own leaves; where a writer left the
    names without paths, these are found where the leaves are."""
    prefixes: dict[PlainPath, int] = {plain_path(root.path): number for number, root in roots.items()}
    lengths = sorted({len(prefix) for prefix in prefixes})
    owned = {leaf.fqn: leaf for leaf in leaves if leaf.owner is not None}
    below: dict[int, dict[str, Entry]] = {number: {} for number in roots}
    for fqn, entry in manifest.entries.items():
        path = plain_path(entry.path)
        number = next((prefixes[path[:n]] for n in lengths if path[:n] in prefixes), None)
        if number is not None:
            below[number][fqn] = entry
        elif (leaf := owned.get(fqn)) is not None and leaf.owner is not None:
            below[leaf.owner][fqn] = entry if manifest.own else replace(entry, path=leaf.path)
    return below


def _integer_keys(leaves: list[Leaf], number: int) -> frozenset[PlainPath]:
    is_integer: Callable[[Key], bool] = lambda key: isinstance(key, DictKey) and type(key.value) is int  # noqa: E731
    return frozenset(
        plain_path(leaf.path[:depth])
        for leaf in leaves
        if leaf.owner == number
        for depth, key in enumerate(leaf.path)
        if is_integer(key)
    )
