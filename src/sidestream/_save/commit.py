"""The files that make a save a checkpoint: its manifest and its marker."""

from __future__ import annotations

from collections.abc import Callable

from .._format.checksum import crc32
from .._format.dcp.described import Described, describe
from .._format.manifest import metadata_line
from .._format.marker import METADATA_NAME, Marker, manifest_name
from .._format.records import Manifest
from .._runtime.threads import io_threads
from .._runtime.torch_probes import TORCH_VERSION
from .._storage import Transaction

__all__ = ["commit"]


async def commit(
    transaction: Transaction,
    manifest: Manifest,
    *,
    saved_at: int = 0,
    render: Callable[[], Described] | None = None,
) -> None:
    """Commit ``transaction``, whose data files are complete, with the manifest and marker made from ``manifest``.

    ``render`` is called in a thread for what is said of the entries; those of ``manifest`` are then ignored. Raises as
    ``Transaction.commit``.
    """

    def files() -> dict[str, list[bytes]]:
        said = describe(manifest.entries) if render is None else render()
        raw, last = said.manifest(manifest, TORCH_VERSION), metadata_line(manifest)
        marker = Marker(
            manifest.save_id, len(raw), crc32(raw), manifest.step, manifest.generation, saved_at, len(last), crc32(last)
        )
        return {manifest_name(manifest.save_id): [raw], METADATA_NAME: [said.metadata(marker)]}

    await transaction.commit(await io_threads().run(files, deadline=transaction.attempt.deadline))
