"""The names, paths and dtypes that ``names=`` and ``dtype=`` give to the tensors and values of a state or a checkpoint,
and the selection of names by patterns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from .._format.records import DictKey, Entries, Entry, Key, Manifest, Row, path_of
from .._runtime.pauses import collected, paced, pause_point
from .._runtime.torch_probes import dtype_from_name, dtype_name, view_key
from .._staging import Captured, Composite
from ..errors import InvalidOptionError, KeyCollisionError, MissingKeysError, UnsupportedTensorError, listed
from ..options import Dtypes, Names
from .assemble import assemble
from .flatten import CompositeLeaf, Leaf, StatefulRoot, leaves_of

__all__ = [
    "Names",
    "Renamed",
    "castable",
    "consistent",
    "new_dtypes",
    "new_names",
    "renamed",
    "renamed_path",
    "renamed_state",
    "selected",
]


@lru_cache(maxsize=1024)
def castable(saved: str, wanted: str) -> bool:
    """Return whether elements of dtype ``saved`` can be converted to ``wanted``. A complex number is not converted to a
    real one, nor a float to an integer."""
    source, target = dtype_from_name(saved), dtype_from_name(wanted)
    if not torch.can_cast(source, target):
        return False
    try:
        torch.empty(1, dtype=target).copy_(
            torch.empty(1, dtype=source)
        )  # can_cast is also true for conversions without a kernel
    except (RuntimeError, TypeError):
        return False
    return True


def selected(names: Iterable[str], select: str | Collection[str] | None, url: str) -> list[str]:
    """Return the ``names`` that match one of the patterns in ``select`` (``"model.*"``), in their order. With None,
    return all. Raises ``MissingKeysError`` for a pattern that matches nothing."""
    names = collected(names)
    if select is None:
        return names
    given: Any = select
    patterns: list[Any] = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidOptionError(f'select={select!r} has to be patterns of names, such as "model.*"')
    plain, globs = _by_kind(patterns)
    unused = dict.fromkeys(patterns)
    found: list[str] = []
    for name in names:
        if taken := name in plain:
            unused.pop(name, None)
        for pattern, matches in globs.items():
            if (not taken or pattern in unused) and matches(name):
                taken = True
                unused.pop(pattern, None)
            pause_point()
        if taken:
            found.append(name)
        pause_point()
    if unused or not patterns:
        has = ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "") or "no names"
        raise MissingKeysError(
            f"{url}: no name matches {', '.join(unused) or 'an empty selection'}; it has {has}", list(unused)
        )
    return found


_FEW = 5
_log = logging.getLogger("sidestream")
_WILDCARD = re.compile(r"[*?\[]")


def _by_kind(patterns: Iterable[str]) -> tuple[dict[str, int], dict[str, Callable[[str], object]]]:
    """Return the patterns without wildcards, each with the number of the others before it, and the others, each with
    the function that matches a name. A pattern without wildcards matches the one name that is equal to it."""
    plain: dict[str, int] = {}
    globs: dict[str, Callable[[str], object]] = {}
    for pattern in patterns:
        if _WILDCARD.search(pattern) is None:
            plain[pattern] = len(globs)
        else:
            globs[pattern] = re.compile(translate(pattern)).match
        pause_point()
    return plain, globs


def new_names(
    names: Names | None,
    fqns: Iterable[str],
    url: str,
    *,
    identity: Callable[[str], object] | None = None,
    others: bool = False,
) -> dict[str, str | None]:
    """Return the new name of each of ``fqns``, in their order. None for an entry that is left out.

    Names with one ``identity`` are tied, and may get one new name. ``others``: a mapping may contain names of other
    ranks. Raises ``KeyCollisionError`` with all new names that several of ``fqns`` would get. Raises
    ``InvalidOptionError`` for names of a mapping that are not among ``fqns``, and for a new name that is not a string
    or is empty.
    """
    found: dict[str, str | None] = {}
    taken: dict[str, list[str]] = {}
    for fqn in fqns:
        found[fqn] = new = fqn if names is None else _new_name(names, fqn)
        if new is not None:
            taken.setdefault(new, []).append(fqn)
        pause_point()
    if isinstance(names, Mapping) and not others and not names.keys() <= found.keys():
        unknown = [str(name) for name in names if name not in found]
        rest = f", and {len(unknown) - _FEW} more" if len(unknown) > _FEW else ""
        raise InvalidOptionError(
            f"{url}: names= has names that are not among those to be renamed: {', '.join(unknown[:_FEW])}{rest}"
        )
    collisions = []
    for new, olds in taken.items():
        # All collisions are collected before one error is raised, so that a mapping is corrected once.
        if len(olds) > 1 and (identity is None or len({identity(old) for old in olds}) > 1):
            collisions.append(f"{new}: the name of {', '.join(olds)}")
        pause_point()
    if collisions:
        raise KeyCollisionError(f"{url}: names= gives one name to several entries:\n  {listed(collisions)}")
    return found


def _new_name(names: Names, fqn: str) -> str | None:
    new: Any = names.get(fqn, fqn) if isinstance(names, Mapping) else names(fqn)
    if new is None:
        return None
    if type(new) is not str:
        raise InvalidOptionError(f"names= gives {new!r} for {fqn!r}, which is not a string")
    if not new:
        raise InvalidOptionError(f"names= gives an empty name for {fqn!r}")
    return str(new)


def path_text(path: Sequence[Key]) -> str:
    """Return the FQN for ``path``."""
    return ".".join(str(key.value) if isinstance(key, DictKey) else str(key) for key in path)


def renamed_path(path: tuple[Key, ...], old: str, new: str, *, nested: bool = False) -> tuple[Key, ...]:
    """Return the path of a renamed entry. If the new name begins with the name of a container of the entry, the entry
    stays in that container. Otherwise it moves to the top. With ``nested``, a moved entry keeps its inner containers,
    as far as the new name ends like the old one."""
    if new == old:
        return path
    # The innermost container whose name the new name begins with: ``model.layer.w`` renamed to ``model.layer.v`` stays
    # in ``layer``. An index of a list is not a name, so an entry of a list is never kept there under another name.
    for depth in range(len(path) - 1, 0, -1):
        if any(isinstance(key, int) for key in path[:depth]):
            continue
        prefix = path_text(path[:depth]) + "."
        if new.startswith(prefix) and len(new) > len(prefix):
            return (*path[:depth], new[len(prefix) :])
    # The other way round: ``a.b.w`` renamed to ``c.b.w`` keeps the container ``b``, and only the outer part of its path
    # becomes a key.
    for depth in range(len(path) if nested else 0):
        rest = path_text(path[depth:])
        if new == rest and not isinstance(path[depth], int):
            return path[depth:]
        if new.endswith("." + rest) and len(new) > len(rest) + 1:
            return (new[: -len(rest) - 1], *path[depth:])
    return (new,)


def consistent(paths: Mapping[str, tuple[Key, ...]], url: str) -> dict[str, tuple[Key, ...]]:
    """Return the path of each FQN, after some entries were renamed or left out. A list with other entries than its
    first elements becomes a dict with the same keys. Raises ``KeyCollisionError`` if an entry has the path of a
    container of others."""
    places = _Places()
    # All paths before the first decision: whether an entry stands where others have a container is known only then. The
    # same holds for a list that has lost an element.
    containers: set[int] = set()
    lists: dict[int, set[str]] = {}
    for path in paths.values():
        for place, key in zip(places.of(path), path, strict=False):
            containers.add(place)
            if type(key) is int:
                lists.setdefault(place, set())
        pause_point()
    for fqn, path in paths.items():
        *outer, own = places.of(path)
        if own in containers:
            raise KeyCollisionError(f"{url}: {fqn} is an entry and a container of others; names= can give other names")
        for place, key in zip(outer, path, strict=True) if lists else ():
            if place in lists:
                lists[place].add(repr(key))
        pause_point()
    broken = {place for place, keys in lists.items() if keys != {repr(index) for index in range(len(keys))}}
    if not broken:
        return dict(paths)
    return {
        fqn: tuple(map(_plain, path, map(broken.__contains__, places.of(path)))) for fqn, path in paced(paths.items())
    }


class _Places:
    """A number for each container and entry. Numbers of a dict that are in a path may have a chosen hash (see
    ``hashed.py``), so a number is found by the text of a key, whose hash depends on a secret of the process."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, str], int] = {}

    def of(self, path: tuple[Key, ...]) -> list[int]:
        """Return the numbers of the containers of ``path`` from the root on, and its own number."""
        found = [0]
        for key in path:
            found.append(self._numbers.setdefault((found[-1], repr(key)), len(self._numbers) + 1))
        return found


def _plain(key: Key, broken: bool) -> Key:
    return DictKey(key) if broken and type(key) is int else key


def new_dtypes(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], dtype: Dtypes | None, url: str, *, others: bool = False
) -> dict[str, str]:
    """Return the new dtype of each tensor that ``dtype=`` converts. ``tensors`` are names, dtypes and shapes.
    ``others``: patterns may match names of other ranks.

    A tensor without dimensions is a counter (Adam's ``step``) or a scale. It is converted only by a pattern that names
    it (``"*.step"``), because bfloat16 counts to 256 only. Raises ``InvalidOptionError`` for one without wildcards
    that names no tensor, logs a warning for another one that matches none, and raises ``UnsupportedTensorError`` for a
    conversion that torch does not make.
    """
    if dtype is None:
        return {}
    by_pattern = dtype if isinstance(dtype, Mapping) else {"*": dtype}
    plain, globs = _by_kind(by_pattern)
    unused = dict.fromkeys(pattern for pattern in by_pattern if pattern != "*")
    found: dict[str, str] = {}
    for name, saved, shape in tensors:
        if name in plain:
            unused.pop(name, None)
        for pattern in [one for one in unused if one in globs and globs[one](name)]:
            del unused[pattern]
        # The first pattern that matches wins, in the order of the mapping. An exact name stands at a place of this
        # order too, so only the wildcards before it are tried.
        before = islice(globs.items(), plain.get(name, len(globs)))
        counts = (pattern for pattern, matches in before if (shape or _names_last(pattern)) and matches(name))
        first = next(counts, name if name in plain else None)
        if first is not None and dtype_from_name(saved).is_floating_point:
            wanted = dtype_name(by_pattern[first])
            if not castable(saved, wanted):
                raise UnsupportedTensorError(
                    f"{name}: torch does not convert {saved} to {wanted}: choose another dtype, or patterns that leave "
                    "this name out"
                )
            if wanted != saved:
                found[name] = wanted
        pause_point()
    if absent := [pattern for pattern in unused if pattern in plain and not others]:
        raise InvalidOptionError(f"{url}: dtype= has names of no dense tensor: {', '.join(map(repr, absent))}")
    if unused and not others:
        _warn_of_unused(tuple(unused))
    return found


@lru_cache(64)
def _warn_of_unused(patterns: tuple[str, ...]) -> None:
    """Log a warning, once for the same patterns."""
    _log.warning("dtype= has patterns that match no dense tensor: %s", ", ".join(map(repr, patterns)))


def _names_last(pattern: str) -> bool:
    """Return whether the last part of the pattern is a name without wildcards."""
    return _WILDCARD.search(pattern.rpartition(".")[2]) is None


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
) -> Renamed:
    """Return ``manifest`` with the names of the target, which has these ``leaves``. ``same(a, b)`` returns whether two
    values of the target are the same memory.

    Entries below an object of the target that are not in its state yet (the moments of a fresh optimizer) are found
    below the name in the checkpoint that all names of the state begin with. Raises what ``new_names`` raises.
    """
    known: dict[str, Leaf] = {}
    roots: dict[int, Leaf] = {}
    for leaf in paced(leaves):
        if isinstance(leaf.value, StatefulRoot):
            roots[leaf.value.number] = leaf
        else:
            known[leaf.fqn] = leaf
    # Tied tensors may get one name: they are one tensor of the checkpoint. Two other tensors may not.
    leaders: list[Leaf] = []

    def identity(fqn: str) -> object:
        leaf = known[fqn]
        leader = next((one for one in leaders if same(one.value, leaf.value)), None)
        if leader is None:
            leaders.append(leader := leaf)
        return leader.fqn

    wholes = [fqn for fqn, leaf in known.items() if leaf.whole is None]
    named = new_names(names, wholes, url, identity=identity, others=others)
    wanted: dict[str, str | None] = {}
    asking: dict[str, list[str]] = {}
    # ``names=`` is asked for whole tensors only. A composite comes before its parts in ``known``, so the new name of
    # the whole is known when a part is reached.
    for fqn, leaf in known.items():
        whole = None if leaf.whole is None else wanted[leaf.whole]
        wanted[fqn] = new = named[fqn] if leaf.whole is None else whole and whole + fqn[len(leaf.whole) :]
        if new is not None:
            asking.setdefault(new, []).append(fqn)
        pause_point()
    claims = _claims(roots, known, wanted, manifest)
    saved = {fqn: new for fqn, new in wanted.items() if new != fqn}
    found: dict[str, Entry | Row] = {}
    rest: dict[str, tuple[Key, ...]] = {}
    tops = {new.split(".")[0] for new in asking if new not in manifest.entries}
    for fqn, one in manifest.stored.items():
        pause_point()
        path = path_of(one)
        if fqn in asking:
            tops.add(path_text(path[:1]))
            found.update((own, _at(one, known[own].path)) for own in asking[fqn])
            continue
        # An entry that the state dict does not have by name. There are three cases. It is below an object or an empty
        # dict of the target, under the name that ``names=`` gives this: the object gets it, under the path that it
        # would have in the target. It is not: it keeps its name. Or the name that it would have is taken by another
        # entry: it gets a mark, so that both stay in the manifest and the report still has its saved name.
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
    return Renamed(replace(manifest, entries=entries, containers={}), saved, inside)


def _claims(
    roots: Mapping[int, Leaf], known: Mapping[str, Leaf], wanted: Mapping[str, str | None], manifest: Manifest
) -> dict[str, Leaf]:
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
        pause_point()
    for number, root in roots.items():
        prefixes = below[number]
        # All leaves of an object were renamed in the same way, or it has no common name in the checkpoint. In the
        # second case what is not in its state yet cannot be found by a prefix, and its own name is taken.
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


def renamed_state(captured: Captured, names: Names | None, dtype: Dtypes | None, url: str, *, others: bool) -> Captured:
    """Return ``captured`` with the new name of every leaf, and with the dtypes of tensors that are converted while they
    are staged. The parts of a tensor that consists of others stay below it, and keep their dtypes. ``others``: a
    mapping may contain names of other ranks.

    Raises ``KeyCollisionError``, ``InvalidOptionError``, ``UnsupportedTensorError``, and what ``leaves_of`` raises.
    """
    if names is None and dtype is None:
        return captured
    found = collected(leaves_of(captured.root))
    leaves = {leaf.fqn: leaf for leaf in found if leaf.whole is None}
    root, containers = captured.root, captured.containers
    if names is not None:
        named = new_names(names, leaves, url, identity=lambda fqn: _identity(leaves[fqn]), others=others)
        first: dict[str, Leaf] = {}
        for fqn, new in paced(named.items()):
            if new is not None:
                first.setdefault(new, leaves[fqn])  # the first of tied tensors with one name
        moved = collected((new, renamed_path(leaf.path, leaf.fqn, new, nested=True)) for new, leaf in first.items())
        paths = consistent(dict(moved), url)
        values = ((path, first[new].value) for new, path in paths.items())
        root = assemble((path, one.composite if isinstance(one, CompositeLeaf) else one) for path, one in values)
        leaves, containers = first, {}  # they have the names of before
    tensors = ((fqn, *look) for fqn, leaf in leaves.items() if (look := _dtype_and_shape(leaf.value)) is not None)
    dtypes = new_dtypes(tensors, dtype, url, others=others)
    return replace(captured, root=root, dtypes=dtypes, containers=containers)


def _dtype_and_shape(value: object) -> tuple[str, tuple[int, ...]] | None:
    """Return dtype and shape of a tensor. None for a value that is not converted."""
    if isinstance(value, torch.Tensor) and not value.is_nested:  # which has no shape, and is refused later
        return dtype_name(value.dtype), tuple(value.shape)
    if isinstance(value, Composite) and value.sharding is not None:
        return dtype_name(value.sharding.dtype), value.sharding.shape
    return None


def _identity(leaf: Leaf) -> object:
    """Return a key that is equal for tied tensors only."""
    value = leaf.value
    if isinstance(value, Composite) and value.sharding is not None:
        return (value.sharding.shape, tuple((part.dtype, *view_key(part)) for part in value.tensors()))
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return (value.dtype, *view_key(value))
    return leaf.fqn
