"""Awaitable control traffic among the ranks of a process group, on connections of sidestream's own."""

from __future__ import annotations

from .calls import prepare_together, run_together, stoppable
from .operation import Operation, Stopped
from .process import has_ended, this_process
from .rendezvous import Member, deadline_of, group_of

__all__ = [
    "Member",
    "Operation",
    "Stopped",
    "deadline_of",
    "group_of",
    "has_ended",
    "prepare_together",
    "run_together",
    "stoppable",
    "this_process",
]
