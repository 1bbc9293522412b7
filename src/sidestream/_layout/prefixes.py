"""Names that differ by one prefix, such as the prefix that a wrapper module adds to the names of the wrapped module."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence

from .._runtime.pauses import paced, pause_point
from ..options import add_prefix, strip_prefix

_MOST_PARTS = 3  # the most parts that a prefix may have
_MOST_TRIED = 8
_MOST_HEADS = 5  # the most beginnings of names that advice lists

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""The parts of names that wrapper modules add."""

_Inserted = tuple[int, tuple[str, ...]]
"""The position of a prefix in a name, and the prefix."""


def prefix_hint(absent: Sequence[str], targets: Collection[str], saved: Collection[str]) -> str:
    """Return advice if all ``absent`` names of a target are names of the checkpoint with one prefix added or removed.
    Otherwise return an empty text. ``targets`` are all names of the target.

    A prefix is at the same depth of every name: ``module.`` of ``model.module.weight``. The advice names the call of
    ``add_prefix`` or ``strip_prefix`` that makes the target fit, if there is one.
    """
    found = _prefix(absent, saved)
    adds = found is not None
    if found is None:
        found = _prefix_to_leave_out(absent, saved)
    if found is None:
        return ""
    at, prefix = found
    dotted = ".".join(prefix) + "."
    heads = sorted({"".join(f"{part}." for part in name.split(".")[:at]) for name in absent})
    call = _call(add_prefix if adds else strip_prefix, dotted, heads, (absent, targets, saved))
    if not call and len(absent) == 1:
        return ""  # one name such as "lr" may end like many others, and no prefix makes the target fit
    name = (_with if adds else _without)(absent[0], at, prefix)
    names = f"the checkpoint has all of these names {'with' if adds else 'without'} the prefix {dotted!r} ({name!r})"
    wrapped = f"{names}, which wrappers such as DataParallel and torch.compile add"
    plain = _WRAPPERS.isdisjoint(prefix)
    if adds:
        remedy = call or f"load into {{{dotted!r} + name: tensor for name, tensor in module.state_dict().items()}}"
        return f"{names}: {remedy}" if plain else f"{wrapped}: save the unwrapped module, or {remedy}"
    if plain:
        return f"{names}: {call or 'leave it out of the names in the target'}"
    unwrap = "unwrap the module before state_dict(), as model.module or model._orig_mod"
    return f"{wrapped}: {unwrap}" + (f", or {call}" if call else "")


def _call(
    function: Callable[..., Callable[[str], str]],
    dotted: str,
    heads: Sequence[str],
    found: tuple[Collection[str], Collection[str], Collection[str]],
) -> str:
    """Return advice to load with ``names=``, which is ``function`` of the prefix after each of ``heads``. Empty if the
    target would not fit then either. ``found`` has the absent names, those of the target and those of the
    checkpoint."""
    absent, targets, saved = found
    if len(heads) > _MOST_HEADS:
        return ""
    names = function(dotted, after=heads)
    missing, taken = set(absent), set()
    for name in targets:
        new = names(name)
        if new not in saved and (name in saved or name in missing):
            return ""
        if new in saved and new in taken:
            return ""
        taken.add(new)
        pause_point()
    after = "" if list(heads) == [""] else f", after={_quoted(heads)}"
    return f"pass names=sidestream.{function.__name__}({_quoted([dotted])}{after}) to the load"


def _quoted(names: Sequence[str]) -> str:
    texts = [json.dumps(name, ensure_ascii=False) for name in names]
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _prefix(absent: Sequence[str], saved: Collection[str]) -> _Inserted | None:
    for inserted in _insertions(absent[0], saved):
        if all(_with(name, *inserted) in saved for name in paced(absent)):
            return inserted
    return None


def _insertions(name: str, saved: Collection[str]) -> list[_Inserted]:
    """Return a few of the insertions that change ``name`` to a saved name."""
    parts = name.split(".")
    found: list[_Inserted] = []
    for other in paced(saved):
        if not other.endswith(parts[-1]):
            continue
        longer = other.split(".")
        more = len(longer) - len(parts)
        if not 0 < more <= _MOST_PARTS:
            continue
        at = next((number for number, part in enumerate(parts) if part != longer[number]), len(parts))
        if parts[at:] == longer[at + more :]:
            found.append((at, tuple(longer[at : at + more])))
            if len(found) == _MOST_TRIED:
                break
    return found


def _prefix_to_leave_out(absent: Sequence[str], saved: Collection[str]) -> _Inserted | None:
    parts = absent[0].split(".")
    for length in range(1, min(_MOST_PARTS, len(parts) - 1) + 1):
        for at in range(len(parts) - length):
            prefix = tuple(parts[at : at + length])
            if all(_without(name, at, prefix) in saved for name in paced(absent)):
                return at, prefix
    return None


def _with(name: str, at: int, prefix: tuple[str, ...]) -> str:
    parts = name.split(".")
    return ".".join([*parts[:at], *prefix, *parts[at:]])


def _without(name: str, at: int, prefix: tuple[str, ...]) -> str | None:
    parts = name.split(".")
    end = at + len(prefix)
    return ".".join([*parts[:at], *parts[end:]]) if tuple(parts[at:end]) == prefix else None
