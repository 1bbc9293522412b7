"""The commit: manifest, marker, one atomic publish, and the truth about what came of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .._format.checksum import crc32
from .._format.dcp.described import Described, describe
from .._format.manifest import metadata_line
from .._format.marker import METADATA_NAME, TAIL_BYTES, Marker, manifest_name
from .._format.records import Manifest
from .._runtime.tasks import finish
from .._runtime.threads import Deadline, Stop, io_threads
from .._runtime.torch_probes import TORCH_VERSION
from .._storage import Store
from .._storage.bodies import BytesBody, PiecesBody
from ..errors import Conflict, NotDurable, OutcomeUnknown, SidestreamError
from ..options import Durability

__all__ = [
    "BytesBody",
    "Outcome",
    "Unfinished",
    "Verdict",
    "carry_out",
    "clean_up",
    "commit",
    "commit_files",
    "commit_part",
    "settle",
]

Outcome = Literal["committed", "absent", "unknown"]
_READ_BACK_S = 10.0
_CLEAN_UP_S = 60.0


@dataclass(slots=True)
class Verdict:
    """What became of a save, filled in as it becomes known: ``"absent"`` until the commit has been sent."""

    outcome: Outcome = "absent"
    look: Callable[[bool], Coroutine[Any, Any, None]] | None = None
    """Reads back the outcome of a commit that was sent. The argument: whether a thread that was left behind may still
    complete the commit."""


async def commit(
    store: Store,
    attempt: str,
    target: str,
    manifest: Manifest,
    verdict: Verdict,
    *,
    durability: Durability,
    deadline: Deadline,
    saved_at: int = 0,
    render: Callable[[], Described] | None = None,
) -> None:
    """Write manifest and marker into ``attempt``, whose data files are complete, and publish it as ``target``.
    ``render`` is called in a thread for what is said of the entries, where those of ``manifest`` are not looked at.

    When this returns the checkpoint is visible and, with ``durability="fsync"``, durable. Once the publish has been
    sent, an error or a cancel leads to a read-back, shielded, so that ``verdict`` tells the truth whatever is raised:
    the cancel; ``Conflict`` (absent); ``NotDurable`` (committed, but a sync failed or timed out); ``OutcomeUnknown``.
    """

    def files() -> dict[str, list[bytes]]:
        said = describe(manifest.entries) if render is None else render()
        raw, last = said.manifest(manifest, TORCH_VERSION), metadata_line(manifest)
        marker = Marker(
            manifest.save_id, len(raw), crc32(raw), manifest.step, manifest.generation, saved_at, len(last), crc32(last)
        )
        return {manifest_name(manifest.save_id): [raw], METADATA_NAME: [said.metadata(marker)]}

    made = await io_threads().run(files, deadline=deadline)
    await commit_files(store, attempt, target, made, verdict, durability=durability, deadline=deadline)


async def commit_files(
    store: Store,
    attempt: str,
    target: str,
    files: Mapping[str, Sequence[bytes]],
    verdict: Verdict,
    *,
    durability: Durability,
    deadline: Deadline,
) -> None:
    """``commit`` of ``files`` that are made already, in pieces; the last one is ``.metadata``, and its end no other
    save's."""
    for name, pieces in files.items():
        body = BytesBody(pieces[0]) if len(pieces) == 1 else PiecesBody(pieces)
        await store.put(f"{attempt}/{name}", body, durability=durability, deadline=deadline)

    async def publish() -> None:
        await store.publish(attempt, target, durability=durability, deadline=deadline)

    tail = _tail_of(files[METADATA_NAME])
    await carry_out(publish, store, f"{target}/{METADATA_NAME}", tail, verdict, target, attempt)


async def commit_part(
    store: Store,
    attempt: str,
    target: str,
    name: str,
    content: bytes,
    verdict: Verdict,
    *,
    durability: Durability,
    deadline: Deadline,
) -> None:
    """As ``commit_files``, of a part that was written ``"apart"``: ``content``, whose end is no other save's, becomes
    the file ``name``."""

    async def publish() -> None:
        body = BytesBody(content)
        await store.publish_part(attempt, target, name, body, durability=durability, deadline=deadline)

    await carry_out(publish, store, f"{target}/{name}", content[-TAIL_BYTES:], verdict, f"{target}/{name}", attempt)


async def carry_out(
    publish: Callable[[], Awaitable[None]],
    store: Store,
    name: str,
    tail: bytes,
    verdict: Verdict,
    target: str,
    attempt: str,
) -> None:
    """``publish()``, and the truth about what came of it: whether the file ``name`` is there and ends with ``tail``."""
    verdict.look = lambda stuck: _read_back(store, name, tail, stuck, verdict)
    verdict.outcome = "unknown"
    try:
        await publish()
        verdict.outcome = "committed"
    except Conflict:
        verdict.outcome = "absent"
        raise
    except NotDurable:
        verdict.outcome = "committed"
        raise
    except (Exception, asyncio.CancelledError) as error:
        outcome = await _after_failure(store, name, tail, error, verdict)
        if isinstance(error, asyncio.CancelledError) or outcome == "absent":
            raise
        if outcome == "committed":
            raise NotDurable(
                f"{target} is committed and complete, but publishing it did not end well: {error}"
            ) from error
        raise OutcomeUnknown(
            f"the commit of {target} was sent, and whether it took place could not be read back: {error}. Nothing was "
            f"deleted; look for {target}, and remove {attempt} if it is still there"
        ) from error
    finally:
        if asyncio._get_running_loop() is not None:  # else the loop has ended, and ``settle`` reads back
            verdict.look = None  # which refers to the verdict


def _tail_of(pieces: Sequence[bytes]) -> bytes:
    tail = b""
    for piece in reversed(pieces):
        if len(tail) >= TAIL_BYTES:
            break
        tail = piece[-TAIL_BYTES:] + tail
    return tail[-TAIL_BYTES:]


async def _after_failure(store: Store, name: str, tail: bytes, error: BaseException, verdict: Verdict) -> Outcome:
    await finish(lambda: _read_back(store, name, tail, getattr(error, "left_behind", False), verdict))
    return verdict.outcome


async def _read_back(store: Store, name: str, tail: bytes, stuck: bool, verdict: Verdict) -> None:
    try:
        found = await store.read_tail(name, TAIL_BYTES, deadline=Deadline.after(_READ_BACK_S)) == tail
    except FileNotFoundError:
        found = False
    except (SidestreamError, OSError):
        return
    if found:
        verdict.outcome = "committed"
    elif not stuck:  # a thread that was left behind may still commit
        verdict.outcome = "absent"


def settle(store: Store, attempt: str, verdict: Verdict, *, stuck: bool) -> None:
    """Find out the outcome of ``attempt``, and remove it if it did not commit. Called in a thread, when no other code
    uses the attempt. Raises what the storage raises."""
    from .._storage.clients.io_loop import Call  # imports fsspec

    look = verdict.look
    if verdict.outcome == "unknown" and look is not None:
        deadline = Deadline.after(_READ_BACK_S)
        Call(lambda: look(stuck)).result("reading back the outcome of the commit", stop=Stop(), deadline=deadline)
    if verdict.outcome == "absent":
        store.discard_here(attempt)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The attempt of an operation that runs in its caller's task, registered in case the loop of that task ends."""

    what: str
    store: Store
    attempt: str
    verdict: Verdict
    expires_at: float

    def abandon(self) -> None:
        """Do nothing: the hops that wait for the threads stop them."""

    def leave(self, *, stuck: bool) -> str:
        try:
            settle(self.store, self.attempt, self.verdict, stuck=stuck)
        except (SidestreamError, OSError) as error:
            return f"outcome: {self.verdict.outcome}; its files could not be removed: {error}"
        return f"outcome: {self.verdict.outcome}"


async def clean_up(store: Store, attempt: str, verdict: Verdict, error: BaseException) -> None:
    """Remove an attempt that certainly did not commit. A failure to do so is told as a note on ``error``."""
    if verdict.outcome != "absent":
        return

    async def discard() -> None:
        try:
            await store.discard(attempt, deadline=Deadline.after(_CLEAN_UP_S))
        except SidestreamError as failure:
            error.add_note(f"what it had written could not be removed: {failure}")

    await finish(discard)
    if getattr(error, "left_behind", False):
        error.add_note(f"a thread hangs in a system call and may still write {attempt}; remove it if it appears")
