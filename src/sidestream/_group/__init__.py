"""Awaitable control traffic among the ranks of a process group, on connections of sidestream's own."""

from __future__ import annotations

from .calls import call_together, stoppable, together
from .failure import Stopped
from .operation import Deadline, Operation
from .process import has_ended, this_process
from .rendezvous import GroupChoice, Member, deadline_of, group_of

__all__ = [
    "Deadline",
    "GroupChoice",
    "Member",
    "Operation",
    "Stopped",
    "call_together",
    "deadline_of",
    "group_of",
    "has_ended",
    "stoppable",
    "this_process",
    "together",
]
