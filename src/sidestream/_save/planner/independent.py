"""The part that one of several ranks saves by itself: whether there is room for it, and its commit."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata

from ..._format.independent_parts import part_metadata_name
from ..._format.marker import METADATA_NAME
from ..._format.records import Manifest
from ..._load.foreign.independent_parts import read_part_markers
from ..._runtime.threads import Deadline, io_threads
from ..._storage import Location, Transaction
from ..._storage.bodies import BytesBody
from ...errors import Conflict, NotDurable, SidestreamError
from ...options import Apart
from .metadata import files_of_part

__all__ = ["commit_as_part", "look_for_room", "tag_of"]

_ID_CHARS = 16


def tag_of(save_id: str) -> str:
    """What the names of its data files end with, so that no other attempt has the same."""
    return f"-{save_id[:_ID_CHARS]}"


async def look_for_room(
    location: Location, apart: Apart, deadline: Deadline, known: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Raises ``Conflict`` where this part is there already, or a whole checkpoint, or a part of another save. Of two
    saves that begin at once neither may see the other: then the reader does.

    Returns the names that there is nothing to say against; given as ``known``, they are not looked into again."""
    try:
        found = await location.store.sizes(location.name, deadline=deadline)
    except FileNotFoundError:
        return known
    found = {name: nbytes for name, nbytes in found.items() if name not in known}
    own = part_metadata_name(apart.rank)
    for name in found:
        if name in (METADATA_NAME, own) or name.startswith("manifest-"):
            raise Conflict(f"{location.url} has {name} already: save to a new directory")
    for rank, marker in (await read_part_markers(location.store, location.name, found, deadline)).items():
        if marker is None or (marker.save_id, marker.world_size) != (apart.save_id, apart.world_size):
            other = "another writer" if marker is None else f"{marker.save_id!r} of {marker.world_size} ranks"
            raise Conflict(
                f"{location.url} has a part of another save: rank {rank} of {other}, this one is {apart.save_id!r} of "
                f"{apart.world_size}; save to a new directory"
            )
    return known | found.keys()


async def commit_as_part(
    transaction: Transaction,
    location: Location,
    apart: Apart,
    metadata: Metadata,
    about: Manifest,
    *,
    saved_at: int,
    known: frozenset[str] = frozenset(),
) -> None:
    """As ``commit``, of a part whose data files are complete: its manifest, and then the file that readers look for.

    Raises ``Conflict`` too if another save has come to the same place meanwhile, also when this part is committed by
    then: what readers take there may be the other one. ``known`` as ``look_for_room`` returned it."""
    deadline = transaction.attempt.deadline
    threads, part_id = io_threads(), about.save_id[:_ID_CHARS]
    files = await threads.run(files_of_part, metadata, about, apart, part_id, saved_at, deadline=deadline)
    (manifest, raw), (name, content) = files.items()
    await threads.run(transaction.write_here, [(manifest, BytesBody(raw))], deadline=deadline)
    known = await look_for_room(location, apart, deadline, known)
    await transaction.commit({name: [content]})
    try:
        await look_for_room(location, apart, deadline, known | {name})
    except Conflict:
        raise
    except SidestreamError as error:
        raise NotDurable(
            f"the part is committed, and whether another save has come to {location.url} meanwhile could not be seen: "
            f"{error}"
        ) from error
