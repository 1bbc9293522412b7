"""The cases of several ranks. Every rank runs ``Case.work`` in an event loop of its own."""

from __future__ import annotations

import _golden_rank_loads as loads
import _golden_rank_losses as losses
import _golden_rank_others as others
import _golden_rank_saves as saves
from _golden_rank import Case
from _golden_users import DIED

CASES: dict[str, Case] = {
    "save, rank 1 makes no call": Case(losses.absent("save", 1, 8.0), waits=True),
    "save, rank 0 makes no call": Case(losses.absent("save", 0, 8.0), waits=True),
    "save, rank 2 of 3 makes no call": Case(losses.absent("save", 2, 8.0, before=True), world=3, waits=True),
    "restore, rank 1 makes no call": Case(losses.absent("restore", 1, 8.0), waits=True),
    "load, rank 1 makes no call": Case(losses.absent("load", 1, 0.5), waits=True),
    "load, rank 0 makes no call": Case(losses.absent("load", 0, 0.5, before=True), waits=True),
    "run, rank 1 makes no call": Case(losses.absent("run", 1, 0.5), waits=True),
    "save": Case(saves.save),
    "save, 3 ranks": Case(saves.three, world=3),
    "save, refused": Case(saves.save_refused),
    "save, cancelled": Case(saves.cancelled),
    "save, not awaited": Case(saves.not_awaited),
    "save, writer process": Case(saves.worker_for),
    "objects": Case(saves.objects),
    "save, rank 1 dies": Case(losses.dies(1, losses.save_dying), dies={1: DIED}),
    "save, rank 0 dies": Case(losses.dies(0, losses.save_dying), dies={0: DIED}),
    "save, rank 2 of 3 dies in the write": Case(losses.dies(2, losses.write_dying), world=3, dies={2: DIED}),
    "save, rank 0 dies in the write": Case(losses.dies(0, losses.write_dying), dies={0: DIED}),
    "load, rank 1 dies": Case(losses.dies(1, losses.load_dying), dies={1: DIED}),
    "load": Case(loads.load),
    "load, damaged": Case(loads.load_damaged),
    "run": Case(loads.run),
    "run, damaged": Case(loads.run_damaged),
    "run, overlapping": Case(loads.run_overlapping),
    "blocking": Case(others.blocking),
    "dcp": Case(others.storages),
    "object store, save": Case(others.stored("save"), stored=True),
    "object store, load": Case(others.stored("load"), stored=True),
    "object store, a value": Case(others.stored("a value"), stored=True),
    "object store, a run": Case(others.stored("a run"), stored=True),
}
