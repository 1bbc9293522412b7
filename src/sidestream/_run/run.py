"""``Run``: the place of a run, and what all its operations share."""

from __future__ import annotations

from contextlib import AbstractContextManager

from .._group import Member, group_of
from .._load.checkpoint import Checkpoint, open_from
from .._runtime.threads import Deadline, time_limit
from .._storage import Location, Store
from ..options import GroupChoice, LoadOptions, check_seconds
from .leases import Leases


class Run:
    """A run as one ``Checkpointer`` uses it."""

    def __init__(self, store: Store, url: str, group: GroupChoice, *, timeout_s: float, lease_s: float) -> None:
        check_seconds("timeout_s", timeout_s)
        check_seconds("lease_s", lease_s)
        self.store = store
        self.url = url
        self.leases = Leases(store, lease_s)
        self.timeout_s = timeout_s
        self._group: GroupChoice = group

    def together(self) -> Member | None:
        """Return the membership of this process in the group that saves and restores together; None if it has no other
        ranks."""
        member = group_of(self._group)
        return None if member is None or member.group.world == 1 else member

    @property
    def leads(self) -> bool:
        """Whether this process deletes steps: in a group only rank 0 does."""
        member = self.together()
        return member is None or member.group.rank == 0

    def at(self, directory: str) -> Location:
        """Return the location of a directory of the run."""
        return Location(self.store, directory, f"{self.url}/{directory}")

    async def open(self, directory: str, options: LoadOptions) -> Checkpoint:
        """Open a step of the run, with the options of a load that concern reading."""
        return await open_from(
            self.at(directory),
            verify=options.verify,
            timeout_s=options.timeout_s,
            safe_globals=options.safe_globals,
            trust=options.trust,
            run=self.url,
        )

    def deadline(self) -> Deadline:
        return Deadline.after(self.timeout_s)

    def time_limit(self, timeout_s: float | None = None) -> AbstractContextManager[None]:
        return time_limit(self.deadline() if timeout_s is None else Deadline.after(timeout_s))
