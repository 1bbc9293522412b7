"""The choices that callers have, checked where they enter. No torch."""

from __future__ import annotations

from typing import Any, Literal, get_args

from .errors import InvalidOption

__all__ = ["Durability", "Verify", "WhenFull", "check_choice", "check_count", "check_step", "check_timeout"]

Durability = Literal["fsync", "flush"]
"""``"fsync"``: what is acknowledged survives a power cut. ``"flush"``: it survives the death of the process only."""

_MAX_TIMEOUT_S = 10**9  # some thirty years; the system's own limit for waits is not much higher

Verify = Literal["always", "manifest", "never"]
"""``"always"``: every byte that is used is checked against its checksum. ``"manifest"``: manifest, file sizes and
layout are checked, the payload is not. ``"never"``: the same, for callers that verify by other means."""


WhenFull = Literal["wait", "skip", "latest", "fail"]
"""What a stage does that finds no memory free. ``"wait"``: wait for some. ``"skip"``: raise ``Skipped``. ``"latest"``:
wait, but raise ``Skipped`` when a newer stage comes before it has begun. ``"fail"``: raise ``ArenaExhausted``."""


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise ``InvalidOption`` unless ``value`` is one of the literals in ``choices``."""
    allowed = get_args(choices)
    if value not in allowed:
        raise InvalidOption(f"{name}={value!r} has to be one of {', '.join(map(repr, allowed))}")


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
