"""Names that differ by one prefix, such as the prefix that a wrapper module adds to the names of the wrapped module."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from .._runtime.threads import politely

__all__ = ["prefix_hint"]

_MOST_PARTS = 3  # the most parts that a prefix may have
_MOST_TRIED = 8

_Inserted = tuple[int, tuple[str, ...]]
"""The position of a prefix in a name, and the prefix."""


def prefix_hint(absent: Sequence[str], saved: Collection[str]) -> str:
    """Return advice if all ``absent`` names of a target are names of the checkpoint with one prefix added or removed;
    empty otherwise. Called in a worker thread.

    A prefix is at the same depth of every name: ``module.`` of ``model.module.weight``.
    """
    if not absent:
        return ""
    found = _prefix(absent, saved)
    if found is not None:
        at, prefix = found
        dotted = ".".join(prefix) + "."
        return (
            f"the checkpoint has all of these names with the prefix {dotted!r} ({_with(absent[0], at, prefix)!r}), "
            "which wrappers such as DataParallel and torch.compile add: save the unwrapped module, or load into "
            f"{{{dotted!r} + name: tensor for name, tensor in module.state_dict().items()}}"
        )
    found = _prefix_to_leave_out(absent, saved)
    if found is not None:
        at, prefix = found
        dotted = ".".join(prefix) + "."
        return (
            f"the checkpoint has all of these names without the prefix {dotted!r} "
            f"({_without(absent[0], at, prefix)!r}), which wrappers such as DataParallel and "
            "torch.compile add: unwrap the module before state_dict(), "
            "as model.module or model._orig_mod"
        )
    return ""


def _prefix(absent: Sequence[str], saved: Collection[str]) -> _Inserted | None:
    for inserted in _insertions(absent[0], saved):
        if all(_with(name, *inserted) in saved for name in politely(absent)):
            return inserted
    return None


def _insertions(name: str, saved: Collection[str]) -> Iterator[_Inserted]:
    """Yield insertions that turn ``name`` into a name that was saved, a few of the possible ones."""
    parts = name.split(".")
    tried = 0
    for other in politely(saved):
        if not other.endswith(parts[-1]):
            continue
        longer = other.split(".")
        more = len(longer) - len(parts)
        if not 0 < more <= _MOST_PARTS:
            continue
        at = next((number for number, part in enumerate(parts) if part != longer[number]), len(parts))
        if parts[at:] == longer[at + more :]:
            yield at, tuple(longer[at : at + more])
            tried += 1
            if tried == _MOST_TRIED:
                return


def _prefix_to_leave_out(absent: Sequence[str], saved: Collection[str]) -> _Inserted | None:
    parts = absent[0].split(".")
    for length in range(1, min(_MOST_PARTS, len(parts) - 1) + 1):
        for at in range(len(parts) - length):
            prefix = tuple(parts[at : at + length])
            if all(_without(name, at, prefix) in saved for name in politely(absent)):
                return at, prefix
    return None


def _with(name: str, at: int, prefix: tuple[str, ...]) -> str:
    parts = name.split(".")
    return ".".join([*parts[:at], *prefix, *parts[at:]])


def _without(name: str, at: int, prefix: tuple[str, ...]) -> str | None:
    parts = name.split(".")
    end = at + len(prefix)
    return ".".join([*parts[:at], *parts[end:]]) if tuple(parts[at:end]) == prefix else None
