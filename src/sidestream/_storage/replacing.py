"""What lies at a target, and whether a save, an export or a removal may take its place or delete it.

Each of them deletes everything in a directory. So it takes only a directory of its own kind: a save replaces a
checkpoint, an export replaces an export. The functions here are pure; each store reads what they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from .._format.marker import END, TAIL_BYTES, find_marker
from .._format.safetensors import STAMP_BYTES, is_stamped
from ..errors import CorruptCheckpointError
from .names import MARKER, READ_FIRST, id_of, is_plain_shard

Found: TypeAlias = Literal[
    "nothing", "empty", "checkpoint", "stock", "export", "safetensors", "directory", "file", "link", "leftover"
]
"""What lies at a target.

- ``"nothing"``, ``"empty"``: no such name; a directory without files, or only with those of saves that commit later.
- ``"checkpoint"``, ``"stock"``: a checkpoint of sidestream, also a damaged one; a checkpoint of stock DCP.
- ``"export"``, ``"safetensors"``: a directory of safetensors that sidestream wrote; one that it did not write.
- ``"directory"``, ``"file"``, ``"link"``: any other directory; a file; a symbolic link.
- ``"leftover"``: a directory with a name that only attempts, or interrupted deletions, have; an export without the file
  that readers look for, which is still written, or was left behind.
"""

Use: TypeAlias = Literal["create", "create file", "overwrite", "export", "remove", "retention", "prune", "collect"]
"""What is done with a target.

- ``"create"``, ``"create file"``: write a directory, or a single file, that does not replace anything.
- ``"overwrite"``: replace it with a checkpoint (``overwrite=True``).
- ``"export"``: replace it with the export of the same step of a run.
- ``"remove"``, ``"retention"``, ``"prune"``, ``"collect"``: delete it by ``remove()``, as an old step, as an old
  export, as what a dead process left.
"""

_ALLOWED: Mapping[Use, frozenset[Found]] = {
    "create": frozenset({"nothing", "empty"}),
    "create file": frozenset({"nothing"}),
    "overwrite": frozenset({"nothing", "empty", "checkpoint", "stock"}),
    "export": frozenset({"nothing", "empty", "export"}),
    "remove": frozenset({"checkpoint", "stock", "export"}),
    "retention": frozenset({"checkpoint"}),
    "prune": frozenset({"export"}),
    "collect": frozenset({"leftover"}),
}

_WHAT: Mapping[Found, str] = {
    "nothing": "is not there",
    "empty": "is an empty directory",
    "checkpoint": "is a checkpoint",
    "stock": "is a checkpoint of another writer",
    "export": "is an export",
    "safetensors": "has safetensors that no export of sidestream wrote",
    "directory": "is not empty, and no checkpoint (it has no .metadata)",
    "file": "already exists and is a file",
    "link": "is a symbolic link",
    "leftover": "has what an unfinished save or export wrote",
}

_DELETES: Mapping[Use, str] = {"remove": "removed", "retention": "deleted", "prune": "deleted", "collect": "deleted"}

DECIDING_BYTES = max(TAIL_BYTES, STAMP_BYTES)
"""The bytes of the deciding file that ``kind_of`` needs: the last ones of ``.metadata``, the first ones of others."""

_LATER = "choose another directory, or remove() it an hour after the last write to it"

_OTHERS_FILES = "is not empty, and no checkpoint: choose another directory, or empty this one first"
_OVERWRITE = "is not empty: save to a new directory, or pass overwrite=True to a save that replaces a checkpoint"

_NOT_CREATED: Mapping[Found, str] = {
    "empty": "is a directory: choose another name, or delete it first",
    "checkpoint": _OVERWRITE,
    "stock": _OVERWRITE,
    "export": "is not empty, it is an export: choose another directory, or remove() the export first",
    "safetensors": _OTHERS_FILES,
    "directory": _OTHERS_FILES,
    "file": "already exists and is a file: choose another name, or delete it first",
    "link": "is a symbolic link: give the directory that it names, or choose another name",
    "leftover": f"is not empty, it {_WHAT['leftover']}: {_LATER}",
}

_NOT_REPLACED: Mapping[Found, str] = {
    "checkpoint": "export to another directory, or remove() the checkpoint first",
    "stock": "export to another directory, or remove() the checkpoint first",
    "export": "save to a new directory, or remove() the export first",
    "safetensors": "choose a new directory, or delete this one first",
    "directory": "save to a new directory, or empty this one first",
    "link": "give the directory that it names",
    "leftover": _LATER,
}

_TENSORS = re.compile(r"model(?:-[0-9]{5}-of-[0-9]{5})?\.safetensors")


def deciding_file(files: Collection[str]) -> str | None:
    """Return the file whose content decides what a directory with these files is; None if their names decide it."""
    if MARKER in files:
        return MARKER
    return min((name for name in files if _TENSORS.fullmatch(name)), default=None)


def kind_of(files: Collection[str], content: bytes) -> Found:
    """Return what a directory with these files, at least one, is. ``content`` has up to ``DECIDING_BYTES`` of the
    ``deciding_file``."""
    decides = deciding_file(files)
    if decides == MARKER:
        return _kind_of_marked(files, content)
    # The stamp in the shard says who wrote it. The file that readers look for says whether it was finished. Safetensors
    # without the stamp belong to another program, and are never deleted.
    complete = not READ_FIRST.isdisjoint(files)
    if decides is not None and is_stamped(content):
        return "export" if complete else "leftover"
    return "safetensors" if decides is not None or complete else "directory"


def _kind_of_marked(files: Collection[str], tail: bytes) -> Found:
    """Other programs, too, have files called ``.metadata``. A damaged one is known by the files beside it."""
    beside = any(id_of(name) is not None or is_plain_shard(name) for name in files)
    try:
        marker = find_marker(tail[-TAIL_BYTES:])
    except CorruptCheckpointError:
        return "checkpoint" if beside else "directory"
    if marker is not None:
        return "checkpoint"
    return "stock" if beside or tail.endswith(END) else "directory"


def refusal(found: Found, use: Use, where: object) -> str | None:
    """Return why ``use`` may not take what was found at ``where``, and what to do instead; None if it may."""
    if found in _ALLOWED[use]:
        return None
    if use in _DELETES:
        return f"{where} {_WHAT[found]}, so nothing was {_DELETES[use]}: {_way_to_delete(found, use)}"
    if found == "file" or use in ("create", "create file"):
        return f"{where} {_NOT_CREATED[found]}"
    return f"{where} {_WHAT[found]}, so it was not replaced: {_NOT_REPLACED[found]}"


def _way_to_delete(found: Found, use: Use) -> str:
    if found == "link":
        return "remove the directory that it names"
    if use in ("retention", "prune") and found in ("checkpoint", "stock", "export"):
        return "remove() deletes it"
    return "remove() deletes checkpoints and exports of sidestream; delete it with other tools"
