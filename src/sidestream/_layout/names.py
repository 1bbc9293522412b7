"""The names, paths and dtypes that ``names=`` and ``dtype=`` give to the tensors and values of a state or a
checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from .._format.records import DictKey, Key
from .._runtime.steps import Steps
from .._runtime.torch_probes import dtype_from_name, dtype_name
from ..errors import InvalidOptionError, KeyCollisionError, UnsupportedTensorError, printable
from ..options import Dtypes, Names
from .cast import castable

__all__ = ["Names", "consistent", "new_names", "path_text", "renamed_path", "target_dtype"]

_SHOWN = 50
_FEW = 5


def new_names(
    names: Names | None,
    fqns: Iterable[str],
    url: str,
    *,
    identity: Callable[[str], object] | None = None,
    others: bool = False,
) -> Steps[dict[str, str | None]]:
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
        yield
    if isinstance(names, Mapping) and not others and not names.keys() <= found.keys():
        unknown = [str(name) for name in names if name not in found]
        rest = f", and {len(unknown) - _FEW} more" if len(unknown) > _FEW else ""
        raise InvalidOptionError(
            f"{url}: names= has names that are not among those to be renamed: {', '.join(unknown[:_FEW])}{rest}"
        )
    collisions = []
    for new, olds in taken.items():
        if len(olds) > 1 and (identity is None or len({identity(old) for old in olds}) > 1):
            collisions.append(f"{new}: the name of {', '.join(olds)}")
        yield
    if collisions:
        shown = [printable(line) for line in collisions[:_SHOWN]]
        more = [f"... and {len(collisions) - _SHOWN} more"] if len(collisions) > _SHOWN else []
        text = "\n  ".join([*shown, *more])
        raise KeyCollisionError(f"{url}: names= gives one name to several entries:\n  {text}")
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
    for depth in range(len(path) - 1, 0, -1):
        if any(isinstance(key, int) for key in path[:depth]):
            continue
        prefix = path_text(path[:depth]) + "."
        if new.startswith(prefix) and len(new) > len(prefix):
            return (*path[:depth], new[len(prefix) :])
    for depth in range(len(path) if nested else 0):
        rest = path_text(path[depth:])
        if new == rest and not isinstance(path[depth], int):
            return path[depth:]
        if new.endswith("." + rest) and len(new) > len(rest) + 1:
            return (new[: -len(rest) - 1], *path[depth:])
    return (new,)


def consistent(paths: Mapping[str, tuple[Key, ...]], url: str) -> Steps[dict[str, tuple[Key, ...]]]:
    """Return the path of each FQN, after some entries were renamed or left out. A list that has lost elements or got
    other entries becomes a dict with the same keys. Raises ``KeyCollisionError`` if an entry has the path of a
    container of others."""
    numbers: dict[tuple[Key, ...], set[Key]] = {}
    containers: set[tuple[Key, ...]] = set()
    for path in paths.values():
        for depth, key in enumerate(path):
            containers.add(path[:depth])
            if type(key) is int:
                numbers.setdefault(path[:depth], set())
        yield
    for fqn, path in paths.items():
        if path in containers:
            raise KeyCollisionError(f"{url}: names= gives the name {fqn} to an entry, and names below it to others")
        for depth, key in enumerate(path) if numbers else ():
            if path[:depth] in numbers:
                numbers[path[:depth]].add(key)
        yield
    broken = {place for place, keys in numbers.items() if keys != set(range(len(keys)))}
    found: dict[str, tuple[Key, ...]] = {}
    for fqn, path in paths.items():
        found[fqn] = path if not broken else tuple(_plain(path, depth, broken) for depth in range(len(path)))
        yield
    return found


def _plain(path: tuple[Key, ...], depth: int, broken: set[tuple[Key, ...]]) -> Key:
    key = path[depth]
    return DictKey(key) if type(key) is int and path[:depth] in broken else key


def target_dtype(name: str, saved: str, dtype: Dtypes | None) -> str:
    """Return the dtype to which the tensor ``name`` is converted. ``saved`` is its own dtype. Raises
    ``UnsupportedTensorError``."""
    if isinstance(dtype, Mapping):
        dtype = next((one for pattern, one in dtype.items() if fnmatchcase(name, pattern)), None)
    if dtype is None or not dtype_from_name(saved).is_floating_point:
        return saved
    wanted = dtype_name(dtype)
    if not castable(saved, wanted):
        raise UnsupportedTensorError(f"{name}: torch does not convert {saved} to {wanted}")
    return wanted
