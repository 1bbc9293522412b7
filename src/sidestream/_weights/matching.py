"""The tensors of a checkpoint that the places of a ``Live`` get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias, TypeVar

import torch

from .._layout.names import new_names
from .._load.checkpoint import TensorInfo
from .._runtime.threads import pause_point
from ..errors import (
    DtypeMismatchError,
    InvalidOptionError,
    KindMismatchError,
    MissingKeysError,
    ShapeMismatchError,
    SidestreamError,
    StateMismatchError,
    listed,
)
from ..options import Names
from .shells import Place

T = TypeVar("T")
Difference: TypeAlias = tuple[str, type[StateMismatchError]]


def match(
    saved_as: Mapping[str, TensorInfo | None],
    where: str,
    places: Mapping[str, Place],
    names: Names | None,
    taker: str,
) -> dict[str, str]:
    """Return the name in ``saved_as``, the tensors at ``where``, for each of ``places``, by their first names. Called
    in a worker thread. ``taker`` is what takes ``names=`` in the program, for advice.

    Raises a ``StateMismatchError`` that lists all differences, and what ``new_names`` raises."""
    try:
        renamed = new_names(names, saved_as, where)
    except SidestreamError:
        raise
    except Exception as error:
        raise InvalidOptionError(f"names= raised {type(error).__name__}: {error}") from error
    saved = {new: fqn for fqn, new in renamed.items() if new is not None}
    found, problems = found_for(places, {new: saved_as[fqn] for new, fqn in saved.items()}, _difference)
    if problems:
        missing = [leader for leader in places if leader not in found]
        raise_mismatch(f"{where} does not fit the weights that are served", problems, _advice(missing, saved, taker))
    return {leader: saved[name] for leader, name in found.items()}


def found_for(
    places: Mapping[str, Place], given: Mapping[str, T], difference: Callable[[T, Place], Difference | None]
) -> tuple[dict[str, str], dict[str, type[StateMismatchError]]]:
    """Return the name in ``given`` for each of ``places``, by their first names, and what does not fit."""
    found: dict[str, str] = {}
    problems: dict[str, type[StateMismatchError]] = {}
    for leader, place in places.items():
        pause_point()
        name = next((name for name in place.names if name in given), None)
        if name is None:
            problems[f"{leader}: missing"] = MissingKeysError
            continue
        found[leader] = name
        if differs := difference(given[name], place):
            problems[f"{name}: {differs[0]}"] = differs[1]
    return found, problems


def raise_mismatch(text: str, problems: Mapping[str, type[StateMismatchError]], advice: str = "") -> NoReturn:
    """Raise the error for differences between places and tensors: the lines of ``problems``, each with its kind."""
    kinds, lines = {*problems.values()}, sorted(problems)
    kind = kinds.pop() if len(kinds) == 1 else StateMismatchError
    raise kind(f"{text}:\n  {listed(lines)}{advice}", lines)


def _difference(info: TensorInfo | None, place: Place) -> Difference | None:
    if info is None or info.kind:
        what = "a plain value" if info is None else f"a tensor of the kind {info.kind}"
        return f"it is {what} there", KindMismatchError
    if info.shape != place.shape:
        return f"it has shape {list(info.shape)}, and {list(place.shape)} is served", ShapeMismatchError
    floating = info.dtype.is_floating_point and place.dtype.is_floating_point
    if info.dtype != place.dtype and not floating:
        return f"it has dtype {info.dtype}, and {place.dtype} is served", DtypeMismatchError
    return None


def _advice(missing: list[str], saved: Mapping[str, str], taker: str) -> str:
    """Return the call that finds all ``missing`` names, if they have one prefix in the checkpoint."""
    if not missing:
        return ""
    first = missing[0]
    prefixes = [name.removesuffix(first) for name in saved if name.endswith(f".{first}")]
    whole = [prefix for prefix in prefixes if all(prefix + name in saved for name in missing)]
    if not whole:
        return ""
    return f"\n  The names have a prefix: pass names=sidestream.strip_prefix({min(whole, key=len)!r}) to {taker}"


def dtypes_of(found: Mapping[str, str], places: Mapping[str, Place]) -> dict[str, torch.dtype]:
    """Return the dtype in which each FQN of ``match`` is served."""
    return {fqn: places[leader].dtype for leader, fqn in found.items()}
