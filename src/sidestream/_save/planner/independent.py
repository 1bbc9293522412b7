"""The coordinator of the part of a checkpoint that one of several ranks saves without the others."""

from __future__ import annotations

from contextlib import aclosing

from ..._format.marker import METADATA_NAME, part_metadata_name
from ..._load.foreign.manifests import read_part_markers
from ..._runtime.threads import Stop, io_threads
from ..._storage import BytesBody, run_without_loop
from ...errors import CheckpointExistsError, NotDurableError, SidestreamError
from ..operation import Committed, Layout, RankReceipt, Solo

__all__ = ["Independent"]


class Independent(Solo):
    """The coordinator of a rank that saves its part in the target itself, without a message to the other ranks."""

    _known: frozenset[str] = frozenset()
    """The names in the target that have been examined."""

    def look(self, stop: Stop) -> None:
        """Check the target before anything is written. Blocks; called in a thread. Raises ``CheckpointExistsError`` as
        ``_look_for_room`` does."""
        self._known = run_without_loop(self._look_for_room, "looking for other saves", stop)

    async def commit(self, receipt: RankReceipt, layout: Layout) -> Committed:
        """Commit a part whose data files are complete: write its manifest, and then the file that readers look for.

        Also raises ``CheckpointExistsError`` if another save has written to the same place meanwhile, even if this part
        is committed by then: readers may find the other save there."""
        order = self._order
        transaction, threads = order.transaction, io_threads()
        files = await threads.run(layout.files, [receipt])
        (manifest, raw), (name, content) = files.items()
        await threads.run(transaction.write, [(manifest, BytesBody(b"".join(raw)))])
        self._known = await self._look_for_room()
        await transaction.commit({name: content})
        self._known |= {name}
        try:
            await self._look_for_room()
        except CheckpointExistsError:
            raise
        except SidestreamError as error:
            raise NotDurableError(
                f"the part is committed, and whether another save has come to {order.location.url} meanwhile could not "
                f"be seen: {error}"
            ) from error
        return Committed(receipt.nbytes)

    async def _look_for_room(self) -> frozenset[str]:
        """Raise ``CheckpointExistsError`` if the target has this part, a whole checkpoint, or a part of another save.
        Two saves that begin at once may not see each other; readers raise an error then.

        Return the names that were examined, which are not examined again."""
        location, part, known = self._order.location, self._order.part, self._known
        assert part is not None
        async with aclosing(location.source()) as source:
            try:
                found = await source.sizes()
            except FileNotFoundError:
                return known
            found = {name: nbytes for name, nbytes in found.items() if name not in known}
            own = part_metadata_name(part.rank)
            for name in found:
                if name in (METADATA_NAME, own) or name.startswith("manifest-"):
                    raise CheckpointExistsError(f"{location.url} has {name} already: save to a new directory")
            markers = await read_part_markers(source, found)
        for rank, marker in markers.items():
            if marker is None or (marker.save_id, marker.world_size) != (part.save_id, part.world_size):
                other = "another writer" if marker is None else f"{marker.save_id!r} of {marker.world_size} ranks"
                raise CheckpointExistsError(
                    f"{location.url} has a part of another save: rank {rank} of {other}, this one is "
                    f"{part.save_id!r} of {part.world_size}; save to a new directory"
                )
        return known | found.keys()
