"""The function ``verify``, which compares every byte of a checkpoint with everything that is known about it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from .._engine.calls import in_operation
from .._format.records import Manifest
from .._runtime.public import public
from .._runtime.tasks import running_loop
from .._runtime.threads import (
    Deadline,
    io_threads,
    report,
    time_limit,
)
from .._storage import Location, RangeSource, locate_by_caller
from ..errors import (
    CorruptCheckpointError,
    IncompleteTensorError,
)
from ..options import Progress, Storage, check_timeout
from .open.manifest import open_manifest
from .operation import LoadLifecycle, reading
from .verification import Verification, VerifyReport, damage_of


@public
async def verify(
    url: str | os.PathLike[str],
    *,
    progress: Progress | None = None,
    timeout_s: float = 600.0,
    storage_options: Mapping[str, Any] | None = None,
    storage: Storage | None = None,
) -> VerifyReport:
    """Read all of the checkpoint at ``url``, 64 MiB at a time, and compare it with all that is known about it.

    For checkpoints of sidestream these are: manifest, sizes and layout; the content of ``.metadata`` against the
    manifest, independent of how it is pickled; every byte of every item against its checksum, its digest, or the
    content that follows from the manifest. Every flipped bit that affects a reader is found. For those of stock DCP
    they are: ``.metadata`` and layout, and every tensor and value with the CRC-32 in its zip, which torch itself never
    compares. Everything that a load would report as damaged is reported. Nothing is unpickled, and no value is built.
    If another checkpoint takes the place of the one that is read, this starts over with that one.

    A cancel leaves nothing behind.

    Args:
        url: A directory, prefix or single file, as for ``load``.
        progress: Called on the event loop with the bytes read so far and the bytes to read. What it raises ends the
            call.
        timeout_s: The limit of the whole call, in seconds.
        storage_options: What the fsspec file system of ``url`` takes; short for ``storage=Storage(options=...)``.
        storage: How the storage at ``url`` is reached.

    Returns:
        The report. Damage is in it, and is not raised: see ``ok``.

    Raises:
        InvalidOptionError, MissingExtraError: The call is wrong, or a package is missing.
        CheckpointNotFoundError: There is no committed checkpoint at ``url``.
        UnsupportedCheckpointError, UnsafeObjectError: This version does not read it.
        StorageError, DeadlineExceededError, OutOfMemoryError: The storage, the time or the memory did not suffice.
            Nothing is known then.
    """
    running_loop("verify")
    check_timeout(timeout_s)
    location = await locate_by_caller(url, storage_options, storage)

    async def work() -> VerifyReport:
        with time_limit(Deadline.after(timeout_s)):
            return await verify_at(location, progress)

    return await in_operation(work, "verify")


async def verify_at(location: Location, progress: Progress | None = None, run: str | None = None) -> VerifyReport:
    """Verify the checkpoint at a resolved location. ``run`` is the URL of the run that it belongs to."""
    async with reading("verify", location.url, run) as lifecycle:
        while True:
            lifecycle.opening()
            try:
                # What cannot be opened is damage too, and so the result of this call. An error is raised only where
                # nothing can be said, for storage that does not answer.
                source, manifest = await open_manifest(location)
            except (CorruptCheckpointError, IncompleteTensorError) as damage:
                await report(lifecycle.failed, damage, 0)
                return VerifyReport(location.url, "", None, 1, 0, (), (), (damage_of(damage),), None)
            async with aclosing(source):
                try:
                    found = await _verify(Verification(source, location.url, manifest, progress), lifecycle)
                # Damage counts only if the directory is still the one that was opened. Otherwise another checkpoint has
                # taken its place while it was read, whose files may have the same names, and everything begins again
                # with that one.
                except (CorruptCheckpointError, FileNotFoundError):
                    if not await source.moved():
                        raise
                else:
                    # A report without damage counts in any case: each byte that was compared belonged to the checkpoint
                    # that was opened.
                    if found.ok or not await source.moved():
                        return await _reported(found, lifecycle)


async def verify_manifest(
    source: RangeSource, url: str, manifest: Manifest, progress: Progress | None = None
) -> VerifyReport:
    """Verify a checkpoint whose manifest was read from ``source`` and validated."""
    async with reading("verify", url) as lifecycle:
        found = await _verify(Verification(source, url, manifest, progress), lifecycle)
        return await _reported(found, lifecycle)


async def _verify(verification: Verification, lifecycle: LoadLifecycle) -> VerifyReport:
    await report(lifecycle.opened, verification.manifest)
    await verification.run(partial(report, lifecycle.planned))
    return await io_threads().run(verification.report)


async def _reported(found: VerifyReport, lifecycle: LoadLifecycle) -> VerifyReport:
    """Return ``found``, and emit its result through ``lifecycle``."""
    if found.damaged:
        await report(lifecycle.failed, CorruptCheckpointError(found.damaged[0].message), 0)
    else:
        await report(lifecycle.read, found.nbytes)
        await report(lifecycle.verified, len(found.unverified))
    return found
