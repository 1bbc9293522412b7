"""The state of a run, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .._runtime.public import Displayed, Table, public
from .retention import Pruned


@public
@dataclass(frozen=True, slots=True, repr=False)
class Health(Displayed):
    """The state of a run, as far as a ``Checkpointer`` knows it. Nothing is read from storage for it.

    Attributes:
        pending: How many saves have begun and not ended.
        last_saved: The step that it committed last.
        since_saved_s: The seconds since then.
        failures: The errors of saves that were not retrieved.
        retention: Why the last pass of retention, or the last deletion of old exports, failed.
        sweeping: Why the files of dead writers could not be found or deleted.
        damaged: Directories that did not verify, and why.
        passed_over: Directories in whose place ``restore`` took another one, and why.
        leases: What failed about leases, by directory.
        pruned: The result of the last pass of retention that succeeded.
    """

    pending: int
    last_saved: int | None
    since_saved_s: float | None
    failures: tuple[str, ...]
    retention: str | None
    sweeping: str | None
    damaged: Mapping[str, str]
    passed_over: Mapping[str, str]
    leases: Mapping[str, str]
    pruned: Pruned

    @property
    def ok(self) -> bool:
        """True if nothing needs attention."""
        wrong = (self.failures, self.retention, self.sweeping, self.damaged, self.passed_over, self.leases)
        return not any(wrong)

    def _summary(self) -> str:
        last = "no step saved" if self.last_saved is None else f"step {self.last_saved} saved"
        ago = "" if self.since_saved_s is None else f" {self.since_saved_s:.0f} s ago"
        return f"{'ok' if self.ok else 'not ok'}: {last}{ago}, {self.pending} pending"

    def _table(self) -> Table:
        rows = [["save", error] for error in self.failures]
        rows += [[what, text] for what, text in (("retention", self.retention), ("sweeping", self.sweeping)) if text]
        for what, found in (("damaged", self.damaged), ("passed over", self.passed_over), ("lease", self.leases)):
            rows += [[f"{what} {name}", text] for name, text in found.items()]
        return Table(("what", "problem"), rows, len(rows))
