"""The publish of what is no checkpoint of ours."""

from __future__ import annotations

from .._runtime.threads import Deadline
from .._save.commit import Verdict
from ..errors import DeadlineExceeded, NotDurable
from .windows import Destination

__all__ = ["publish"]


async def publish(into: Destination, verdict: Verdict, deadline: Deadline) -> None:
    """Runs to its end, whoever cancels; a deadline that passes meanwhile leaves the outcome open."""
    make_visible = into.store.publish_file if into.naming == "single" else into.store.publish
    try:
        await make_visible(into.attempt, into.target, durability=into.durability, deadline=deadline)
        verdict.outcome = "committed"
    except NotDurable:
        verdict.outcome = "committed"
        raise
    except DeadlineExceeded:
        verdict.outcome = "unknown"
        raise
