"""The removal of files that killed saves left behind, with their ages by the clock of the storage."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime

from ...errors import CheckpointExistsError
from ...options import Listing
from ..names import ABANDONED_AFTER_S
from .bucket import Bucket
from .names import NOTE, id_of, is_plain_shard

__all__ = ["READ_FIRST", "age_s", "clear_export", "clock_of", "collect_orphans"]

_MARKER = ".metadata"
READ_FIRST = frozenset({"model.safetensors", "model.safetensors.index.json"})
"""The files that mark an export as complete. They are written last and deleted first."""
_SHARD = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


async def clock_of(bucket: Bucket) -> datetime | None:
    """Return the time of the storage, which is that of an object that this writes."""
    name = f".leases/clock-{uuid.uuid4().hex}"  # unique, because each call deletes its object
    await bucket.put(bucket.key(name), memoryview(b"now"))
    listing = await bucket.listing(".leases")
    await bucket.delete(".leases", [name.rpartition("/")[2]])
    written = listing.files.get(name.rpartition("/")[2])
    return None if written is None else written.modified


def age_s(now: datetime | None, then: datetime | None) -> float:
    if now is None or then is None:
        return 0.0
    return max(0.0, (now.astimezone(UTC) - then.astimezone(UTC)).total_seconds())


async def collect_orphans(bucket: Bucket, target: str, after_s: float) -> list[str]:
    """Delete the files of each save to ``target``, and those of a copy, if none of them was written within ``after_s``.
    Return the names of the deleted files.

    Does nothing if there is a checkpoint. Then the version of its marker decides which saves can still be committed,
    and a replacement deletes the files of the others."""
    listing = await bucket.listing(target)
    if _MARKER in listing.files or NOTE in listing.files:
        return []
    owned: dict[str, list[str]] = {}
    for file in listing.files:
        owner = "" if is_plain_shard(file) else id_of(file)
        if owner is not None:
            owned.setdefault(owner, []).append(file)
    if not owned:
        return []
    now = await clock_of(bucket)
    collected: list[str] = []
    for owner, files in owned.items():
        if min(age_s(now, listing.files[file].modified) for file in files) > after_s:
            await bucket.delete(target, files)
            collected += files
            if owner:
                await bucket.abort_uploads(target, owner)
    await bucket.forget(target)
    return collected


async def clear_export(bucket: Bucket, target: str, listing: Listing) -> bool:
    """Delete the export at ``target``, whether it is complete or was left behind by a killed process, so that another
    one can be written. Returns False and does nothing if there is none.

    Of two exports at the same time at most one succeeds, because each creates its files. Raises
    ``CheckpointExistsError`` if the storage cannot create objects conditionally."""
    files = listing.files
    complete = not READ_FIRST.isdisjoint(files)
    shards = [info for name, info in files.items() if _SHARD.fullmatch(name)]
    if listing.directories or _MARKER in files or not (complete or shards):
        return False
    if not bucket.capabilities.create_only:
        raise CheckpointExistsError(
            f"{bucket.url}/{target} has an export, and {bucket.engine.name} creates no object conditionally, so it was "
            "not replaced: delete it first"
        )
    if not complete:
        now = await clock_of(bucket)
        if min(age_s(now, info.modified) for info in shards) <= ABANDONED_AFTER_S:
            return False
    await bucket.delete(target, sorted(files, key=lambda name: name not in READ_FIRST))
    await bucket.forget(target)
    return True
