"""Names of the directories of a run, which are its steps and the attempts that become them, and of files that contain
the id of a save: where several saves to a target write their files in the same directory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable

from .._format.marker import METADATA_NAME as MARKER

__all__ = [
    "ABANDONED_AFTER_S",
    "LEASES",
    "MARKER",
    "NOTE",
    "READ_FIRST",
    "attempt_name",
    "export_files",
    "id_of",
    "is_attempt_at",
    "is_attempt_name",
    "is_plain_shard",
    "is_unfinished",
    "name_with_id",
    "owner_of",
    "parse_step",
    "retired_files",
    "sidecar_with_id",
    "step_name",
    "target_of_attempt",
]

ABANDONED_AFTER_S = 3600.0
"""An attempt without a lease that was last written to longer ago than this counts as one of a dead process."""

LEASES = ".leases"
"""The directory of a run that holds its leases."""

_NUMBER = "0|[1-9][0-9]{0,17}"  # without leading zeros: with them a step could have two directories
_GENERATION = "[2-9]|[1-9][0-9]{1,8}"
_STEP = re.compile(rf"step-({_NUMBER})(?:\.g({_GENERATION}))?")
_TARGET = re.compile(rf"\.?(step-(?:{_NUMBER})(?:\.g(?:{_GENERATION}))?)(?:[./].*)?")  # also of earlier versions
_OF_STEP = re.compile(rf"\.({_NUMBER})(?:\.g({_GENERATION}))?(?:\.[0-9a-f]{{32}})?\.[0-9a-f]{{32}}\.partial")

_ATTEMPT = re.compile(rf"{_OF_STEP.pattern}|\.(?:step-.+|[0-9a-f]{{32}})\.[0-9a-f]{{32}}\.partial")


def step_name(step: int, generation: int) -> str:
    return f"step-{step}" if generation == 1 else f"step-{step}.g{generation}"


def parse_step(name: str) -> tuple[int, int] | None:
    """Return the step and the generation of a directory named by ``step_name``; None for every other name."""
    match = _STEP.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2] or 1))


def attempt_name(target: str, save_id: str) -> str:
    """Return the name of the hidden sibling in which ``target`` is written before it is published.

    Two targets never share a name of an attempt. The name does not contain the name of the target, because other tools
    search names for ``step-<digits>`` and the like, at any place. The attempt at a step has the number of the step in
    its name, as in ``.100.g2.<save_id>.partial``. If ``step_name`` does not make the name of the target, the name of
    the attempt contains a digest of it."""
    of_step = _TARGET.fullmatch(target)
    parsed = parse_step(of_step[1]) if of_step else None
    words = [] if parsed is None else [str(parsed[0])]
    if parsed is not None and parsed[1] > 1:
        words.append(f"g{parsed[1]}")
    if parsed is None or step_name(*parsed) != target:
        words.append(hashlib.blake2b(target.encode(errors="surrogateescape"), digest_size=16).hexdigest())
    return ".".join(["", *words, save_id, "partial"])


def is_attempt_name(name: str) -> bool:
    """Return whether ``attempt_name`` makes this name, or made it for a step in an earlier version. Directories of
    other programs, which may lie beside any target, have other names."""
    return _ATTEMPT.fullmatch(name) is not None


def is_attempt_at(name: str, target: str) -> bool:
    """Return whether ``attempt_name`` makes this name for ``target``."""
    return is_attempt_name(name) and name == attempt_name(target, name.split(".")[-2])


def target_of_attempt(name: str) -> str | None:
    """Return the name of the step's directory that an attempt was made for; None if its target was not a step.

    The names of attempts of earlier versions contain the name of the target. Attempts on object stores are below the
    target."""
    number = _OF_STEP.fullmatch(name)
    if number is not None:
        return step_name(int(number[1]), int(number[2] or 1))
    match = _TARGET.fullmatch(name)
    return match[1] if match else None


# --- files ---

NOTE = ".sidestream-retired"
"""The file beside the files of a checkpoint that is being deleted, with the id of its save. Other programs make no file
of this name, and the names of sidecar files do not begin with a dot."""

READ_FIRST = frozenset({"model.safetensors", "model.safetensors.index.json"})
"""The files that mark an export as complete. They are written last and deleted first."""

_OURS = re.compile(r"(?:__[0-9]+_[0-9]+|manifest)-([0-9a-f]{32})(?:\.distcp|\.[0-9]+)?|file-([0-9a-f]{32})\..+")
_PLAIN = re.compile(r"__[0-9]+_[0-9]+\.distcp")


def name_with_id(name: str, save_id: str) -> str:
    stem, dot, suffix = name.rpartition(".")
    return f"{stem}-{save_id}{dot}{suffix}" if dot else f"{name}-{save_id}"


def sidecar_with_id(name: str, save_id: str) -> str:
    return f"file-{save_id}.{name}"


def id_of(file: str) -> str | None:
    """Return the id of the save that wrote this file; None if its name contains no id."""
    match = _OURS.fullmatch(file)
    return None if match is None else match[1] or match[2]


def owner_of(file: str) -> str | None:
    """Return the id of the save that this file, or the file that it signs, belongs to; None if there is none."""
    return id_of(file.removesuffix(".sig"))


def is_plain_shard(file: str) -> bool:
    """Return whether this is the name of a shard file without an id, as in a checkpoint that was copied."""
    return _PLAIN.fullmatch(file) is not None


def retired_files(files: Collection[str], save_id: str) -> list[str]:
    """Return those of the files in a directory that belong to the checkpoint that is being deleted. The last one is the
    note, because it distinguishes these files from an attempt.

    ``save_id`` is the content of the note; empty if the id was unknown. Files with other ids stay, because a save that
    began before this checkpoint was committed may be committed while its files are deleted. Without the note, which
    another removal has deleted after all other files, files without the id stay too."""
    committed = MARKER in files or NOTE not in files
    found = [
        name
        for name in files
        if name not in (MARKER, NOTE)
        and (owner_of(name) == save_id or not (committed or (save_id and owner_of(name) is not None)))
    ]
    return [*found, NOTE]


def export_files(files: Iterable[str]) -> list[str]:
    """Return the files of the export in a directory, those that readers look for first. Files with an id stay, which
    belong to attempts at a checkpoint."""
    return sorted((name for name in files if owner_of(name) is None), key=lambda name: name not in READ_FIRST)


def is_unfinished(files: Iterable[str]) -> bool:
    """Return whether a directory without a complete marker, which contains these files, is an attempt of saves that
    commit with a marker, or a checkpoint that is being deleted. Otherwise, if it has a manifest, it is a checkpoint
    whose marker was lost."""
    names = frozenset(files) - {MARKER}
    return NOTE in names or all(id_of(name) is not None for name in names)
