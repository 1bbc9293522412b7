"""What ``names=`` and ``dtype=`` make of the tensors and values of a state or a checkpoint, decided before anything is
done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from .._runtime.steps import Steps
from .._runtime.torch_probes import dtype_from_name, dtype_name
from ..errors import InvalidOption, KeyCollision, UnsupportedTensor, printable
from ..options import Dtypes, Names
from .cast import castable

__all__ = ["Names", "new_names", "target_dtype"]

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
    """Return the new name of each of ``fqns``, in their order; None for those that have none.

    Names with one ``identity`` are tied, and may get one new name. ``others``: a mapping may contain names of other
    ranks. Raises ``KeyCollision``, which lists all new names that several of ``fqns`` would get; ``InvalidOption`` for
    names of a mapping that are not among ``fqns``, and for what is no name.
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
        raise InvalidOption(
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
        raise KeyCollision(f"{url}: names= gives one name to several entries:\n  {text}")
    return found


def _new_name(names: Names, fqn: str) -> str | None:
    new: Any = names.get(fqn, fqn) if isinstance(names, Mapping) else names(fqn)
    if new is None:
        return None
    if type(new) is not str:
        raise InvalidOption(f"names= gives {new!r} for {fqn!r}, which is no name")
    if not new:
        raise InvalidOption(f"names= gives an empty name for {fqn!r}")
    return str(new)


def target_dtype(name: str, saved: str, dtype: Dtypes | None) -> str:
    """Return what the tensor ``name`` becomes, which was saved with dtype ``saved``. Raises ``UnsupportedTensor``."""
    if isinstance(dtype, Mapping):
        dtype = next((one for pattern, one in dtype.items() if fnmatchcase(name, pattern)), None)
    if dtype is None or not dtype_from_name(saved).is_floating_point:
        return saved
    wanted = dtype_name(dtype)
    if not castable(saved, wanted):
        raise UnsupportedTensor(f"{name}: torch does not convert {saved} to {wanted}")
    return wanted
