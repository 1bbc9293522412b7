"""The comparison of ``.metadata``, which stock DCP reads, with the manifest, which sidestream reads. Both were written
from one plan."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

from .._format.dcp.metadata import read_dcp_description
from .._format.dcp.write import metadata_of
from .._format.marker import (
    ATTRIBUTE,
    METADATA_NAME,
    PART_ATTRIBUTE,
    TAIL_BYTES,
    attribute_end,
    find_marker,
    part_metadata_name,
)
from .._format.records import Manifest
from .._layout.checks import compare_metadata
from .._runtime.threads import collected, io_threads
from .._storage import RangeSource
from ..errors import CorruptCheckpointError, UnsupportedCheckpointError
from .foreign.manifests import MOST_METADATA_BYTES, read_file, read_part

__all__ = ["compare_descriptions"]


async def compare_descriptions(
    source: RangeSource,
    manifest: Manifest,
    noting: Callable[[str], AbstractContextManager[object]],
    note: Callable[[CorruptCheckpointError, str], None],
) -> int:
    """Call ``note`` for each difference, and return the number of bytes that were read. ``noting`` returns the context
    in which damage of a file is recorded in place of being raised."""
    sizes = await source.sizes()
    if not manifest.parts:
        raw = await read_file(source, METADATA_NAME, sizes.get(METADATA_NAME, 0), most_bytes=MOST_METADATA_BYTES)
        with noting(METADATA_NAME):
            for difference in await io_threads().run(_differences_of_one_plan, manifest, raw):
                note(difference, METADATA_NAME)
        return len(raw)
    nbytes = 0
    for marker in manifest.parts:  # each was saved by a rank without the others
        name = part_metadata_name(marker.rank)
        with noting(name):
            part = await read_part(source, sizes, marker)
            part = replace(part, save_id=marker.save_id)  # the id in storage_meta, which is not that of the part
            raw = await read_file(source, name, sizes.get(name, 0), most_bytes=MOST_METADATA_BYTES)
            for difference in await io_threads().run(_differences, part, raw, PART_ATTRIBUTE, name):
                difference.file = name
                note(difference, name)
            nbytes += len(raw)
    return nbytes


def _differences_of_one_plan(manifest: Manifest, raw: bytes | bytearray) -> list[CorruptCheckpointError]:
    """Return the differences, without decoding ``.metadata`` if it is what this version would write: decoding makes a
    hundred thousand objects for 10,000 tensors."""
    known = manifest.exact and not manifest.ranks  # otherwise planners added data, or ranks share lists of chunks
    marker = find_marker(bytes(raw[-TAIL_BYTES:])) if known else None
    if marker is not None and raw == metadata_of(manifest.entries, marker):
        return []
    return _differences(manifest, raw, ATTRIBUTE)


def _differences(
    manifest: Manifest, raw: bytes | bytearray, attribute: str, file: str = METADATA_NAME
) -> list[CorruptCheckpointError]:
    """Return the places where ``.metadata`` contradicts the manifest. ``attribute`` is the name of the attribute that
    points to the manifest."""
    try:
        metadata = read_dcp_description(raw)
    except UnsupportedCheckpointError as error:
        if not manifest.exact:
            raise
        return [CorruptCheckpointError(f"{file}: {error.args[0]}, which sidestream never writes", file=file)]
    compared = collected(compare_metadata(manifest, metadata))
    found = [one for one in compared if one is not None]
    pointer = metadata.attributes.get(attribute)
    if pointer is None or not raw.endswith(attribute_end(attribute, pointer)):
        found.append(
            CorruptCheckpointError(f"{file}: its attribute {attribute!r} does not point to this manifest", file=file)
        )
    return found
