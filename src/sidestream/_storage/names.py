"""Names of the directories of a run: its steps, and the attempts that become them."""

from __future__ import annotations

import re

__all__ = ["attempt_name", "parse_step", "step_name", "target_of_attempt"]

_NUMBER = "0|[1-9][0-9]{0,17}"  # as Python formats it: another spelling would be a second directory for the same step
_GENERATION = "[2-9]|[1-9][0-9]{1,8}"
_STEP = re.compile(rf"step-({_NUMBER})(?:\.g({_GENERATION}))?")
_TARGET = re.compile(rf"\.?(step-(?:{_NUMBER})(?:\.g(?:{_GENERATION}))?)(?:[./].*)?")


def step_name(step: int, generation: int) -> str:
    return f"step-{step}" if generation == 1 else f"step-{step}.g{generation}"


def parse_step(name: str) -> tuple[int, int] | None:
    """Return the step and the generation of a directory named by ``step_name``; None for every other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))


def attempt_name(target: str, save_id: str) -> str:
    """The hidden sibling in which ``target`` is written before it is published; names end at 255 bytes."""
    return f".{target.encode()[:160].decode(errors='ignore')}.{save_id}.partial"


def target_of_attempt(name: str) -> str | None:
    """The step's directory that an attempt would have become; None if it was no step's."""
    match = _TARGET.fullmatch(name)
    return match[1] if match else None
