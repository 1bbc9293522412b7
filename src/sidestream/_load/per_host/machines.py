"""Which ranks can share what they read: those of one machine, as far as they read the same checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

from ..._format.records import Manifest
from ..._group import Operation
from ..._runtime.threads import Deadline, io_threads
from ..._storage import LocalStore, Location
from ..._storage.clients.lazy import frozen

__all__ = ["Told", "all_or_none", "by_machine", "source_of"]

Told: TypeAlias = Mapping[str, Any]
Decide: TypeAlias = Callable[[Sequence[bytes]], Awaitable[Sequence[bytes]]]


def source_of(location: Location, manifest: Manifest, operation: Operation) -> str:
    """The same on two ranks of a machine only if the same name is a file with the same content for both. In a thread;
    raises ``OSError``. Others learn no secret from it.

    Copies of a checkpoint of ours are alike. Those of other writers have no name of their own, and the same file names
    mostly: there it is the place that counts."""
    if manifest.own:
        return manifest.save_id
    try:
        said = repr(_place(location)).encode()
    except TypeError:  # only this process knows what it reads from
        return uuid4().hex
    return hashlib.blake2b(said, digest_size=16, key=operation.save_id.encode()).hexdigest()


def _place(location: Location) -> Hashable:
    store = location.store
    if isinstance(store, LocalStore):  # processes may see different file systems under one path
        status = os.stat(store.root / location.name)
        return location.url, status.st_dev, status.st_ino
    address = getattr(store, "address", None)
    if address is None:
        raise TypeError("no other process can open this store")
    servers = sorted((name, one) for name, one in os.environ.items() if "ENDPOINT" in name or "EMULATOR" in name)
    return location.name, address.url, frozen(address.storage_options), tuple(servers)


# --- on rank 0, which does in threads what grows with the number of ranks ---


def by_machine(deadline: Deadline) -> Decide:
    """Each rank hears of those on its machine that read the same, itself included."""
    return partial(_in_thread, _by_machine, deadline)


def all_or_none(deadline: Deadline) -> Decide:
    """The ranks of a machine share if all of them can."""
    return partial(_in_thread, _all_or_none, deadline)


async def _in_thread(
    decide: Callable[[Sequence[bytes]], Sequence[bytes]], deadline: Deadline, parts: Sequence[bytes]
) -> Sequence[bytes]:
    return await io_threads().run(decide, parts)


def _by_machine(parts: Sequence[bytes]) -> Sequence[bytes]:
    return _answered([json.loads(part) for part in parts], _machine, lambda ranks: ranks)


def _machine(one: Told) -> Hashable:
    return (one["scope"], one["source"]) if one["scope"] else one["rank"]


def _all_or_none(parts: Sequence[bytes]) -> Sequence[bytes]:
    def decided(ranks: Sequence[Told]) -> Told:
        return {"why": max((one["why"] for one in ranks if one["why"] is not None), default=None), "host": ranks}

    return _answered([json.loads(part) for part in parts], lambda one: one["host"], decided)


def _answered(
    told: Sequence[Told], key: Callable[[Told], Hashable], answer: Callable[[Sequence[Told]], Any]
) -> Sequence[bytes]:
    """To each rank the ``answer`` for all those that have its ``key``, made once for them."""
    machines: dict[Hashable, list[Told]] = {}
    for one in told:
        machines.setdefault(key(one), []).append(one)
    answers = {name: json.dumps(answer(ranks)).encode() for name, ranks in machines.items()}
    return [answers[key(one)] for one in told]
