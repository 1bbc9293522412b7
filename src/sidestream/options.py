"""The choices that callers have, checked where they enter. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, TypeAlias, get_args

from .errors import InvalidOption

__all__ = [
    "Allowance",
    "Durability",
    "Progress",
    "Verify",
    "WhenFull",
    "check_choice",
    "check_count",
    "check_step",
    "check_strict",
    "check_timeout",
]

Durability = Literal["fsync", "flush"]
"""``"fsync"``: what is acknowledged survives a power cut. ``"flush"``: it survives the death of the process only."""

_MAX_TIMEOUT_S = 10**9  # some thirty years; the system's own limit for waits is not much higher

Verify = Literal["always", "manifest", "never"]
"""``"always"``: every byte that is used is checked against its checksum. ``"manifest"``: manifest, file sizes and
layout are checked, the payload is not. ``"never"``: the same, for callers that verify by other means."""

Allowance = Literal["partial", "cast", "ignore_unexpected"]
"""What ``strict=`` of a load may name. ``"partial"``: keys that the checkpoint lacks are left as they are. ``"cast"``:
tensors of another dtype are converted. ``"ignore_unexpected"``: keys that the target lacks are not loaded."""

Progress: TypeAlias = Callable[[int, int], object]
"""Called on the event loop with the bytes read so far and the bytes to read, first with 0. What it raises ends the
load, as an error of storage would."""

WhenFull = Literal["wait", "skip", "latest", "fail"]
"""What a stage does that finds no memory free. ``"wait"``: wait for some. ``"skip"``: raise ``Skipped``. ``"latest"``:
wait, but raise ``Skipped`` when a newer stage comes before it has begun. ``"fail"``: raise ``ArenaExhausted``."""


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise ``InvalidOption`` unless ``value`` is one of the literals in ``choices``."""
    allowed = get_args(choices)
    if value not in allowed:
        raise InvalidOption(f"{name}={value!r} has to be one of {', '.join(map(repr, allowed))}")


def check_strict(strict: object) -> frozenset[str]:
    """Its names. Raise ``InvalidOption`` for anything but a collection of what ``Allowance`` lists."""
    names = get_args(Allowance)
    if isinstance(strict, str) or not isinstance(strict, Collection) or any(name not in names for name in strict):
        raise InvalidOption(
            f"strict={strict!r} has to be a set or sequence of {', '.join(map(repr, names))}: each name loosens the "
            'comparison of target and checkpoint, as in strict={"partial"}'
        )
    return frozenset(strict)


def check_timeout(timeout_s: object) -> None:
    number = timeout_s if type(timeout_s) is int or type(timeout_s) is float else 0
    if not 0 < number <= _MAX_TIMEOUT_S:
        raise InvalidOption(f"timeout_s={timeout_s!r} has to be a positive number of seconds, {_MAX_TIMEOUT_S} at most")


def check_count(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise InvalidOption(f"{name}={value!r} has to be a positive integer")


def check_step(step: object) -> None:
    if type(step) is not int or not 0 <= step < 10**18:
        raise InvalidOption(f"step={step!r} has to be an integer of at most 18 digits, not negative")
