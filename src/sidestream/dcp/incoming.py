"""Values as the bytes that DCP's load planners take: made again from data, never those of the checkpoint."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from .._threads import Deadline, io_threads
from ..errors import UnsafeObject
from ..foreign import read_item, read_values
from ..format.records import Manifest, ValueEntry
from ..format.torch_zip import TorchZip, is_zip
from ..format.transforms import unpack
from ..options import Trust
from ..plan.objects import Allowed
from ..storage import Location

__all__ = ["read_bytes"]

_MAX_BYTES = 1 << 30


async def read_bytes(
    location: Location,
    manifest: Manifest,
    entries: Mapping[str, ValueEntry],
    deadline: Deadline,
    *,
    allow: Allowed,
    trust: Trust,
) -> dict[str, bytes]:
    """For each of ``entries`` what ``torch.load`` makes the value of; with ``trust="pickle"`` the bytes that were
    saved. Raises ``UnsafeObject``, ``Corrupt``."""
    if trust == "pickle" and not any(entry.told for entry in entries.values()):
        return {fqn: await _as_saved(location, entry, deadline) for fqn, entry in entries.items()}
    try:
        values = await read_values(location.store, location.name, manifest, entries, deadline, allow)
    except UnsafeObject as error:
        error.add_note('StorageReader(allow=[...]) takes its type, trust="pickle" hands its bytes to the planner')
        raise
    return await io_threads().run(lambda: {fqn: _saved(value) for fqn, value in values.items()}, deadline=deadline)


async def _as_saved(location: Location, entry: ValueEntry, deadline: Deadline) -> bytes:
    raw = await read_item(location.store, location.name, entry, deadline)

    def checked() -> bytes:
        content = unpack(raw, _MAX_BYTES) if entry.transform else raw
        if is_zip(content):
            TorchZip(io.BytesIO(content), len(content)).check()  # torch compares no checksums
        return bytes(content)

    return await io_threads().run(checked, deadline=deadline)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
