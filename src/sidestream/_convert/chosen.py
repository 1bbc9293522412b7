"""The plain tensors that an export, or a published version, takes of a state: which ones, their names and dtypes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from .._format.records import CompositeEntry
from .._layout.names import new_dtypes, new_names, selected
from .._layout.save_layout import SavePlan
from .._runtime.torch_probes import dtype_from_name
from ..errors import UnsupportedTensorError
from ..options import Dtypes, Names
from .selection import Selection
from .source import Source
from .targets import OutTensor


class Selects(Protocol):
    """What is taken, as for ``HF``."""

    @property
    def select(self) -> str | Collection[str] | None: ...
    @property
    def names(self) -> Names | None: ...
    @property
    def dtype(self) -> Dtypes | None: ...


class _Candidate(NamedTuple):
    """A tensor that may be taken. Tensors with one ``identity`` are tied. ``composite`` is the type of a tensor that
    consists of others."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    identity: object
    composite: str = ""


def choose_staged(wanted: Selects, plan: SavePlan, url: str) -> tuple[Selection, dict[int, OutTensor]]:
    """Choose from a state that is being staged. Returns the tensors by the items of the plan, too. Called in a worker
    thread. Raises what ``choose_saved`` raises."""
    named = list(plan.named_tensors())
    candidates = [_Candidate(*one) for one in named]
    candidates += [_Candidate(fqn, dtype, shape, fqn, kind) for fqn, dtype, shape, kind in plan.named_composites()]
    chosen = _choose(wanted, candidates, url)
    items = {fqn: item for fqn, _, _, item in named}
    return chosen, {items[chosen.origin[one.fqn]]: one for one in chosen.tensors}


def choose_saved(wanted: Selects, opened: Source, url: str) -> Selection:
    """Choose from a checkpoint. Called in a worker thread. Raises ``MissingKeysError``, ``KeyCollisionError``,
    ``InvalidOptionError`` and ``UnsupportedTensorError``."""
    parts = opened.parts()
    candidates = [
        _Candidate(fqn, one.entry.dtype, one.entry.shape, one.identity)
        for fqn, one in opened.tensors.items()
        if fqn not in parts
    ]
    candidates += [
        _Candidate(fqn, one.dtype, one.shape, fqn, one.type)
        for fqn, one in opened.entries.items()
        if isinstance(one, CompositeEntry) and fqn not in parts
    ]
    return _choose(wanted, candidates, url)


def _choose(wanted: Selects, candidates: Sequence[_Candidate], url: str) -> Selection:
    taken = set(selected((one.fqn for one in candidates), wanted.select, url))
    identities = {one.fqn: one.identity for one in candidates}
    chosen = [one.fqn for one in candidates if one.fqn in taken]
    named = new_names(wanted.names, chosen, url, identity=identities.__getitem__)
    found = Selection(left_out=tuple(one.fqn for one in candidates if named.get(one.fqn) is None))
    tensors = ((new, one.dtype, one.shape) for one in candidates if (new := named.get(one.fqn)) is not None)
    dtypes = new_dtypes(tensors, wanted.dtype, url)
    first: dict[object, str] = {}
    cast: list[str] = []
    for one in candidates:
        new = named.get(one.fqn)
        if new is None or new in found.origin:
            continue
        if one.composite:
            raise UnsupportedTensorError(
                f"{one.fqn}: it is a {one.composite}, and safetensors hold plain tensors only; "
                "leave it out with select="
            )
        leader = first.setdefault(one.identity, new)
        if leader != new:
            found.aliases[new] = leader
            continue
        dtype = dtypes.get(new, one.dtype)
        if dtype != one.dtype:
            cast.append(new)
        nbytes = math.prod(one.shape) * dtype_from_name(dtype).itemsize
        found.tensors.append(OutTensor(new, dtype, one.shape, nbytes, (new,), one.identity))
        found.origin[new] = one.fqn
    return replace(found, order=list(found.origin), cast=tuple(cast), wholes=tuple(found.origin))
