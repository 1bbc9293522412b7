"""The commit of an attempt and its other ends, for code on the loop of operations. The work is done in threads."""

from __future__ import annotations

import logging

from .._runtime.tasks import run_shielded
from .._runtime.threads import Deadline, Stop, io_threads, time_limit
from .._storage import CommitFiles, MakeFiles, Transaction
from ..errors import NotDurableError, OutcomeUnknownError, SidestreamError, is_stuck

__all__ = ["clean_up", "commit", "remove_replaced", "settled"]

_READ_BACK_S = 10.0
_CLEAN_UP_S = 60.0

_log = logging.getLogger("sidestream")


async def commit(transaction: Transaction, files: CommitFiles | MakeFiles) -> None:
    """Do ``Transaction.commit`` in a thread. If that fails, or this task is cancelled, find out the outcome.

    Raises:
        asyncio.CancelledError: ``outcome`` may have any value.
        CheckpointExistsError: ``outcome`` is ``"absent"``.
        NotDurableError, OutcomeUnknownError: ``outcome`` is ``"committed"`` or ``"unknown"``.
    """
    stop = Stop()
    try:
        await io_threads().run(transaction.commit, files, stop, stop=stop)
    except BaseException as error:
        settled_error = await settled(transaction, error)
        if settled_error is error:
            raise
        raise settled_error from error


async def settled(transaction: Transaction, error: BaseException) -> BaseException:
    """Return the error to raise after ``error`` has ended the commit, or the wait for it. If the commit was sent, and
    its outcome is unknown, it is read back first. So ``outcome`` is true afterwards.

    This is ``error`` itself if it is a cancel, or if nothing was committed."""
    transaction.end()
    if is_stuck(error):
        transaction.may_follow = True
    if not transaction.can_be_read_back:
        return error
    await run_shielded(_read_back, transaction)
    outcome, attempt = transaction.outcome, transaction.attempt
    if outcome == "absent" or not isinstance(error, Exception):
        return error
    if outcome == "unknown":
        return OutcomeUnknownError(
            f"the commit of {attempt.target} was sent, and whether it took place could not be read back: {error}. "
            f"Nothing was deleted; look for {attempt.target}, and remove {attempt.name} if it is still there"
        )
    # The checkpoint is complete, but how far the sync has come is unknown. So what was replaced stays until another
    # collection: after a power cut the old name may be the one that the file system has.
    committed = NotDurableError(
        f"{attempt.target} is committed and complete, but publishing it did not end well: {error}"
    )
    transaction.keep_replaced(committed)
    return committed


async def _read_back(transaction: Transaction) -> None:
    try:
        with time_limit(Deadline.after(_READ_BACK_S)):
            await io_threads().run(transaction.read_back)
    except (SidestreamError, OSError):
        return


async def clean_up(transaction: Transaction, error: BaseException) -> None:
    """Delete the files of an attempt that was not committed. A failure to do so is added to ``error`` as a note."""
    # Files of a committed checkpoint stay, and so do those of an unknown outcome: they may be the only checkpoint there
    # is.
    if transaction.outcome != "absent":
        return
    await run_shielded(_discard, transaction, error)
    if is_stuck(error):
        attempt = transaction.attempt.name
        if isinstance(error, SidestreamError):
            error.about(left_behind=attempt)
        error.add_note(f"a thread hangs in a system call and may still write {attempt}; remove it if it appears")


async def _discard(transaction: Transaction, error: BaseException) -> None:
    try:
        with time_limit(Deadline.after(_CLEAN_UP_S)):
            await io_threads().run(transaction.discard)
    except (SidestreamError, OSError) as failure:
        error.add_note(f"what it had written could not be removed: {failure}")
        if isinstance(error, SidestreamError):
            error.about(left_behind=transaction.attempt.name)


async def remove_replaced(transaction: Transaction) -> None:
    """Remove what a ``"replacement"`` has replaced, if it was committed durably. Called at the end of every save and
    export, also of one that was cancelled after its commit, and not interrupted by a cancel. A failure is only logged,
    because the save itself has succeeded."""
    if transaction.has_replaced:
        await run_shielded(_discard_replaced, transaction)


async def _discard_replaced(transaction: Transaction) -> None:
    try:
        with time_limit(Deadline.after(_CLEAN_UP_S)):
            await io_threads().run(transaction.discard_replaced)
    except (SidestreamError, OSError) as error:
        _log.warning("what %s replaced could not be removed: %s", transaction.attempt.target, error)
