"""``names=`` and ``dtype=`` of a save: the FQNs and the dtypes in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from .._layout.renamed_state import renamed_state
from .._runtime.threads import run_sliced
from .._staging import Captured, PlanCache
from ..errors import InvalidOptionError
from ..options import Dtypes, Names
from .stage import LayOut

__all__ = ["SavedAs"]


@dataclass(frozen=True, slots=True)
class SavedAs:
    """The names and dtypes that a state gets in the checkpoint (``SaveOptions``)."""

    names: Names | None = None
    dtype: Dtypes | None = None

    def check(self, *, own: bool) -> None:
        """Raise ``InvalidOptionError`` if these are given for a save without a stager of our ``own``."""
        given = [name for name, one in (("names=", self.names), ("dtype=", self.dtype)) if one is not None]
        if given and not own:
            raise InvalidOptionError(
                f"{' and '.join(given)} need a stager of sidestream, which renames and converts while it copies: leave "
                "out stager=, or pass a sidestream.AsyncStager()"
            )

    def applied(self, lay_out: LayOut, url: str, *, others: bool) -> LayOut:
        """Return ``lay_out`` of the state under its new names, with its new dtypes. ``others``: a mapping may contain
        names of other ranks."""
        if self.names is None and self.dtype is None:
            return lay_out
        names, dtype = self.names, self.dtype

        def renamed(plans: PlanCache, budget_bytes: int, captured: Captured) -> object:
            captured = run_sliced(renamed_state(captured, names, dtype, url, others=others))
            return lay_out(plans, budget_bytes, captured)

        return renamed
