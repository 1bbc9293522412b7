"""``open_checkpoint``: look into a checkpoint and take from it what is needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ._tasks import running_loop
from ._threads import Deadline, io_threads
from ._torch import dtype_from_name
from .catalog import read_manifest
from .errors import InvalidOption, MissingKeys
from .foreign import read_values
from .format.records import EmptyEntry, Manifest, TensorEntry, ValueEntry
from .loading import new_tensors
from .options import Verify, check_choice, check_timeout
from .plan.assemble import assemble
from .plan.objects import Allowed, allowed_types
from .plan.ranges import Box
from .reading import Reader, Wanted, whole
from .storage import Location, locate_directory

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A saved tensor: dtype, global shape, bytes."""

    dtype: torch.dtype
    shape: torch.Size
    nbytes: int


async def open_checkpoint(
    url: str | os.PathLike[str], *, verify: Verify = "always", timeout_s: float = 600.0, allow: Iterable[type] = ()
) -> Checkpoint:
    """Read and validate what the checkpoint at ``url`` says about itself, and no payload.

    ``timeout_s`` is for this call and for each one on the result, ``allow`` as for ``load``. Raises
    ``CheckpointNotFound``, ``Corrupt``, ``UnsupportedCheckpoint``. The result holds nothing open and needs no closing.
    """
    running_loop("open_checkpoint")
    check_choice("verify", verify, Verify)
    check_timeout(timeout_s)
    location, allowed = locate_directory(url), allowed_types(allow)
    manifest = await read_manifest(location.store, location.name, location.url, Deadline.after(timeout_s))
    return Checkpoint(location, manifest, verify, timeout_s, allowed)


class Checkpoint(Mapping[str, TensorInfo | None]):
    """What is in a checkpoint, by FQN: a ``TensorInfo`` for a tensor, None for a plain value."""

    def __init__(
        self, location: Location, manifest: Manifest, verify: Verify, timeout_s: float, allow: Allowed
    ) -> None:
        self._location = location
        self._manifest = manifest
        self._verify: Verify = verify
        self._timeout_s = timeout_s
        self._allow = allow

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def save_id(self) -> str:
        """The id of the save that wrote it; empty if another writer did."""
        return self._manifest.save_id

    @property
    def step(self) -> int | None:
        """The step of the run that it belongs to, if a ``Checkpointer`` wrote it."""
        return self._manifest.step

    def __getitem__(self, fqn: str) -> TensorInfo | None:
        entry = self._entry(fqn)
        if not isinstance(entry, TensorEntry):
            return None
        dtype = dtype_from_name(entry.dtype)
        shape = torch.Size(entry.shape)
        return TensorInfo(dtype, shape, shape.numel() * dtype.itemsize)

    def __iter__(self) -> Iterator[str]:
        return (fqn for fqn, entry in self._manifest.entries.items() if not isinstance(entry, EmptyEntry))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def info(self, fqn: str) -> TensorInfo:
        """Dtype and shape of a tensor. Raises ``MissingKeys``; ``InvalidOption`` if it is a plain value."""
        info = self[fqn]
        if info is None:
            raise InvalidOption(f"{fqn} is a plain value; await value({fqn!r})")
        return info

    async def tensor(self, fqn: str, rows: slice | None = None) -> torch.Tensor:
        """The tensor, or those ``rows`` of its first dimension, as a new one in host memory.

        Only the rows asked for are read, extended to whole checksum blocks of 1 MiB. Raises ``MissingKeys``,
        ``InvalidOption`` for a slice with a step, ``Corrupt``.
        """
        info = self.info(fqn)
        entry = self._manifest.entries[fqn]
        assert isinstance(entry, TensorEntry)
        box = whole(entry) if rows is None else _rows(fqn, entry.shape, rows)
        target = torch.empty(box.sizes, dtype=info.dtype)
        await self._reader().read([Wanted(fqn, entry, box, target)], own=self._manifest.own)
        return target

    async def value(self, fqn: str) -> Any:
        """A plain value, or a tensor like ``tensor()``. Raises ``MissingKeys``, ``UnsafeObject`` (other writers)."""
        entry = self._entry(fqn)
        if isinstance(entry, TensorEntry):
            return await self.tensor(fqn)
        return (await self._values({fqn: entry} if isinstance(entry, ValueEntry) else {})).get(fqn, {})

    async def state_dict(self) -> dict[Any, Any]:
        """Everything, nested as it was saved, in new host memory; tied tensors are tied again.

        A checkpoint of stock DCP says neither where it had empty containers nor which keys were integers.
        """
        entries = self._manifest.entries
        fqns = [fqn for fqn, entry in entries.items() if isinstance(entry, TensorEntry)]
        tensors = await io_threads().run(new_tensors, entries, fqns)
        values = await self._values({fqn: entry for fqn, entry in entries.items() if isinstance(entry, ValueEntry)})
        distinct: dict[int, Wanted] = {}
        for fqn in fqns:
            entry = entries[fqn]
            assert isinstance(entry, TensorEntry)
            distinct.setdefault(id(tensors[fqn]), Wanted(fqn, entry, whole(entry), tensors[fqn]))
        await self._reader().read(distinct.values(), own=self._manifest.own)
        leaves = {**values, **tensors}
        return assemble((entry.path, leaves.get(fqn, {})) for fqn, entry in entries.items())

    def _entry(self, fqn: str) -> TensorEntry | ValueEntry | EmptyEntry:
        try:
            return self._manifest.entries[fqn]
        except KeyError:
            raise MissingKeys(f"{self.url} has no {fqn!r}", [fqn]) from None

    def _reader(self) -> Reader:
        deadline = Deadline.after(self._timeout_s)
        return Reader(self._location.store, self._location.name, self._verify, deadline)

    async def _values(self, entries: Mapping[str, ValueEntry]) -> dict[str, Any]:
        store, directory = self._location.store, self._location.name
        deadline = Deadline.after(self._timeout_s)
        return await read_values(store, directory, self._manifest, entries, deadline, self._allow)


def _rows(fqn: str, shape: tuple[int, ...], rows: slice) -> Box:
    if not shape or rows.step not in (None, 1):
        raise InvalidOption(f"{fqn}: rows={rows} needs at least one dimension and no step")
    start, stop, _ = rows.indices(shape[0])
    return Box((start, *(0 for _ in shape[1:])), (max(0, stop - start), *shape[1:]))
