"""The areas that are recorded: one JSON file of a set each."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import _golden_edges
import _golden_load
import _golden_ranks
import _golden_run
import _golden_save
import _golden_sequences
import _golden_stores
import _golden_tools
from _golden_table import Table, fixed

AREAS: dict[str, Callable[[Table], Awaitable[None]]] = {
    "save": _golden_save.save,
    "staging": _golden_save.staging,
    "files": _golden_save.files,
    "load": _golden_load.load,
    "open": _golden_load.open_checkpoint,
    "checkpointer": _golden_run.checkpointer,
    "errors": _golden_tools.errors,
    "verify": _golden_tools.verify,
    "convert": _golden_tools.convert,
    "signing": _golden_tools.signing,
    "blocking": _golden_edges.blocking,
    "dcp": _golden_edges.storages,
    "cli": _golden_edges.command_line,
    "stores": _golden_stores.stores,
    "ranks": _golden_ranks.ranks,
    "system-calls": _golden_sequences.sequences,
}


async def record(area: str, folder: Path) -> dict[str, Any]:
    """Run every scenario of ``area`` and return its entries."""
    table = Table(folder)
    with fixed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own deprecations
        await AREAS[area](table)
    return table.entries
