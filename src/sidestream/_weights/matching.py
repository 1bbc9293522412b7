"""The tensors of a checkpoint that the places of a ``Live`` get."""

from __future__ import annotations

from collections.abc import Mapping

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
)
from ..options import Names
from .shells import Place, raise_mismatch


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
    found: dict[str, str] = {}
    missing: list[str] = []
    problems: dict[str, type[StateMismatchError]] = {}
    for leader, place in places.items():
        pause_point()
        name = next((name for name in place.names if name in saved), None)
        if name is None:
            missing.append(leader)
            problems[f"{leader}: it is not there"] = MissingKeysError
            continue
        found[leader] = saved[name]
        if difference := _difference(saved_as[saved[name]], place):
            problems[f"{name}: {difference[0]}"] = difference[1]
    if problems:
        text = f"{where} does not fit the weights that are served"
        raise_mismatch(text, problems, _advice(missing, saved, taker))
    return found


def _difference(info: TensorInfo | None, place: Place) -> tuple[str, type[StateMismatchError]] | None:
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
