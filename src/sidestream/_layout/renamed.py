"""A checkpoint with the names of the target state dict, as ``names=`` of a load maps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .._format.records import Entries, Entry, Key, Manifest, Row, path_of, stored
from .._runtime.steps import Steps
from .flatten import Leaf, StatefulRoot
from .names import Names, new_names, path_text

__all__ = ["Names", "Renamed", "renamed"]

_MARK = "\0"  # is added to a name of the checkpoint that the state dict has for another entry


@dataclass(frozen=True, slots=True)
class Renamed:
    """A manifest with the names of a state dict. ``manifest`` has every entry under its name in the state dict. Entries
    that the state dict does not request keep their names. ``saved`` has the name in the checkpoint for each name that
    differs, or None if ``names=`` gives none. ``inside`` are names of entries that are not requested, although other
    entries below the same top-level key of the checkpoint are."""

    manifest: Manifest
    saved: Mapping[str, str | None] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()

    def saved_name(self, fqn: str) -> str:
        """Return the name of ``fqn`` in the checkpoint."""
        return self.saved.get(fqn) or fqn


def renamed(
    manifest: Manifest,
    leaves: Iterable[Leaf],
    names: Names,
    url: str,
    *,
    same: Callable[[Any, Any], bool],
    others: bool,
) -> Steps[Renamed]:
    """Return ``manifest`` with the names of the target, which has these ``leaves``. ``same(a, b)`` returns whether two
    values of the target are the same memory.

    Entries below an object of the target that are not in its state yet (the moments of a fresh optimizer) are found
    below the name in the checkpoint that all names of the state begin with. Raises what ``new_names`` raises.
    """
    known: dict[str, Leaf] = {}
    roots: dict[int, Leaf] = {}
    for leaf in leaves:
        if isinstance(leaf.value, StatefulRoot):
            roots[leaf.value.number] = leaf
        else:
            known[leaf.fqn] = leaf
        yield
    leaders: list[Leaf] = []

    def identity(fqn: str) -> object:
        leaf = known[fqn]
        leader = next((one for one in leaders if same(one.value, leaf.value)), None)
        if leader is None:
            leaders.append(leader := leaf)
        return leader.fqn

    wholes = [fqn for fqn, leaf in known.items() if leaf.whole is None]
    named = yield from new_names(names, wholes, url, identity=identity, others=others)
    wanted: dict[str, str | None] = {}
    for fqn, leaf in known.items():  # the name of a part begins with the name of its tensor
        whole = None if leaf.whole is None else wanted[leaf.whole]
        wanted[fqn] = named[fqn] if leaf.whole is None else whole and whole + fqn[len(leaf.whole) :]
        yield
    asking: dict[str, list[str]] = {}
    for fqn, new in wanted.items():
        if new is not None:
            asking.setdefault(new, []).append(fqn)
    claims = yield from _claims(roots, known, wanted, manifest)
    saved = {fqn: new for fqn, new in wanted.items() if new != fqn}
    found: dict[str, Entry | Row] = {}
    rest: dict[str, tuple[Key, ...]] = {}
    tops = {new.split(".")[0] for new in asking if new not in manifest.entries}
    for fqn, one in stored(manifest.entries).items():
        yield
        path = path_of(one)
        if fqn in asking:
            tops.add(path_text(path[:1]))
            found.update((own, _at(one, known[own].path)) for own in asking[fqn])
            continue
        claimed = _claimed(path, claims)
        own = fqn if claimed is None else ".".join(filter(None, (claimed[0].fqn, path_text(path[claimed[1] :]))))
        if claimed is None or own in known or own in found:
            own = fqn + _MARK if fqn in known or fqn in found else fqn
            rest[own] = path
            found[own] = _at(one, (own + _MARK,))
        else:
            found[own] = _at(one, (*claimed[0].path, *path[claimed[1] :]))
        if own != fqn:
            saved[own] = fqn
    inside = frozenset(own for own, path in rest.items() if path_text(path[:1]) in tops)
    entries: Any = Entries(found) if isinstance(manifest.entries, Entries) else found
    return Renamed(replace(manifest, entries=entries), saved, inside)


def _claims(
    roots: Mapping[int, Leaf], known: Mapping[str, Leaf], wanted: Mapping[str, str | None], manifest: Manifest
) -> Steps[dict[str, Leaf]]:
    """Return the objects and the empty dicts of the target by their names in the checkpoint. Entries below such a name
    belong to them."""
    below: dict[int, set[str | None]] = {number: set() for number in roots}
    claims: dict[str, Leaf] = {}
    for fqn, leaf in known.items():
        new = wanted[fqn]
        if leaf.owner is not None:
            rest = fqn[len(roots[leaf.owner].fqn) :]
            fits = new is not None and new.endswith(rest)
            below[leaf.owner].add(new[: len(new) - len(rest)] if new is not None and fits else None)
        elif leaf.kind == "empty" and new is not None and new not in manifest.entries:
            claims[new] = leaf
        yield
    for number, root in roots.items():
        prefixes = below[number]
        prefix = next(iter(prefixes)) if len(prefixes) == 1 else None
        claims[prefix or root.fqn] = root
    return claims


def _claimed(path: tuple[Key, ...], claims: Mapping[str, Leaf]) -> tuple[Leaf, int] | None:
    """Return the object or dict that claims the entry at ``path``, and the length of its own path."""
    for depth in range(1, len(path) + 1):
        root = claims.get(path_text(path[:depth]))
        if root is not None:
            return root, depth
    return None


def _at(one: Entry | Row, path: tuple[Key, ...]) -> Entry | Row:
    if path_of(one) == path:
        return one
    return (*one[:-1], path) if isinstance(one, tuple) else replace(one, path=path)
