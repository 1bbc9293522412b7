"""Names of the directories of a run: its steps, and the attempts that become them."""

from __future__ import annotations

import hashlib
import re

__all__ = ["ABANDONED_AFTER_S", "LEASES", "attempt_name", "parse_step", "step_name", "target_of_attempt"]

ABANDONED_AFTER_S = 3600.0
"""How long nobody has written to an attempt without a lease when it is taken for one of a dead process."""

LEASES = ".leases"
"""The directory of a run in which its leases lie."""

_NUMBER = "0|[1-9][0-9]{0,17}"  # as Python formats it: another spelling would be a second directory for the same step
_GENERATION = "[2-9]|[1-9][0-9]{1,8}"
_STEP = re.compile(rf"step-({_NUMBER})(?:\.g({_GENERATION}))?")
_TARGET = re.compile(rf"\.?(step-(?:{_NUMBER})(?:\.g(?:{_GENERATION}))?)(?:[./].*)?")  # also attempts of old
_OF_STEP = re.compile(rf"\.({_NUMBER})(?:\.g({_GENERATION}))?(?:\.[0-9a-f]{{32}})?\.[0-9a-f]{{32}}\.partial")


def step_name(step: int, generation: int) -> str:
    return f"step-{step}" if generation == 1 else f"step-{step}.g{generation}"


def parse_step(name: str) -> tuple[int, int] | None:
    """Return the step and the generation of a directory named by ``step_name``; None for every other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))


def attempt_name(target: str, save_id: str) -> str:
    """Return the name of the hidden sibling in which ``target`` is written before it is published.

    Two targets never share one. It contains no target's name, because other tools search names for ``step-<digits>``
    and the like, anywhere in them: what belongs to a step is called by its number, ``.100.g2.<save_id>.partial``, and a
    target with another name than ``step_name`` gives it a digest of that."""
    of_step = _TARGET.fullmatch(target)
    parsed = parse_step(of_step[1]) if of_step else None
    words = [] if parsed is None else [str(parsed[0])]
    if parsed is not None and parsed[1] > 1:
        words.append(f"g{parsed[1]}")
    if parsed is None or step_name(*parsed) != target:
        words.append(hashlib.blake2b(target.encode(errors="surrogateescape"), digest_size=16).hexdigest())
    return ".".join(["", *words, save_id, "partial"])


def target_of_attempt(name: str) -> str | None:
    """Return the name of the step's directory that an attempt, or an upload, was made for; None if it was no step's.

    Attempts of earlier versions have the name of their target in theirs, and those on object stores lie in it."""
    number = _OF_STEP.fullmatch(name)
    if number is not None:
        return step_name(int(number[1]), int(number[2] or 1))
    match = _TARGET.fullmatch(name)
    return match[1] if match else None
