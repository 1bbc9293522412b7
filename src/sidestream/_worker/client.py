"""The writer processes of this process, one for each set of options, started when they are needed."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .._runtime.threads import Stop, current_deadline, io_threads, result_of
from .._staging import MappedMemory
from .._storage import Body, Store, Transaction
from ..errors import InvalidOptionError, WriterProcessError
from ..options import WriterChoice, WriterProcess, check_writer
from .job import Job, JobOrder
from .link import WorkerLink
from .process import available
from .wire import Unsendable, pack

_CLOSE_S = 1.0


class Worker:
    """The writer process for one set of options. At most one exists at a time; a lost one is replaced."""

    def __init__(self, options: WriterProcess) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._link: WorkerLink | None = None
        self._users = 0

    def start(self) -> Future[None]:
        """Start the process unless it exists. Return a future that is done when the process is ready. Waits only for
        the start of a thread."""
        return self._current().up

    async def up(self) -> None:
        """Start the process unless it exists, and wait until it is ready. Raises ``WriterProcessError`` and
        ``DeadlineExceededError``."""
        stop = Stop()
        await io_threads().run(self._ready, stop, stop=stop)

    async def share(self, memories: Sequence[MappedMemory]) -> None:
        """Map ``memories`` in the process if it is up, so that no save has to wait for that."""
        link = self._link
        if link is not None and link.up.done() and link.lost is None:
            await io_threads().run(_share, link, memories)

    def acquire(self) -> None:
        """Take a reference, which keeps a started process alive until ``release()``."""
        with self._lock:
            self._users += 1
            if self._link is not None:
                self._link.add_users(1)

    def release(self) -> None:
        """Give back a reference that ``acquire`` has taken."""
        with self._lock:
            self._users -= 1
            if self._link is not None:
                self._link.add_users(-1)

    @property
    def pid(self) -> int | None:
        """The PID of the current process, or None."""
        link = self._link
        return None if link is None or link.lost is not None else link.pid

    def write(
        self,
        transaction: Transaction,
        files: Iterable[tuple[str, Body]],
        *,
        stop: Stop,
        fall_back: bool,
        url: str,
    ) -> None:
        """Write ``files`` in the process, with the guarantees and errors of ``Transaction.write``. This process makes
        the attempt, and the writer process joins it.

        Also raises ``WriterProcessError``. With ``fall_back``, threads of this process write if no writer process can
        be started.
        """
        attempt = transaction.attempt
        # The trainer makes the attempt and commits it. The process joins it, as a rank would, so a process that is
        # killed at any moment leaves an attempt that the trainer still owns.
        transaction.write((), stop=stop)
        # Only before the process has been given something: threads can begin from the start then. A process that is
        # lost later is replaced by another process.
        if fall_back and not self._starts(stop):
            transaction.write(files, stop=stop)
            return
        assert transaction.address is not None
        joined = replace(attempt, kind="joined")
        order = JobOrder(transaction.address, joined, url, current_deadline())
        self.acquire()  # or the process might end before the request reaches it
        try:
            Job(order, files, stop).run(transaction, lambda: self._ready(stop), self.options.retries)
        finally:
            self.release()

    def _starts(self, stop: Stop) -> bool:
        try:
            self._ready(stop)
        except WriterProcessError:
            return False
        return True

    def _ready(self, stop: Stop) -> WorkerLink:
        """Return the link of a process that is ready. Raises ``WriterProcessError``, ``ClosedError`` and
        ``DeadlineExceededError``."""
        link = self._current()
        result_of(link.up, stop, "starting the writer process")
        return link

    def _current(self) -> WorkerLink:
        with self._lock:
            # A link is used once. The references of its users pass to the next one, so that the new process, too, stays
            # up for as long as they do.
            if self._link is None or self._link.lost is not None:
                self._link = WorkerLink(self.options)
                self._link.add_users(self._users)
            return self._link

    def close(self) -> None:
        """End the process. Saves that it is writing fail; the next save starts another process."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.end("the writer process was ended", _CLOSE_S)

    def forget(self) -> None:
        """Close this side of the link in a forked child, because the process belongs to the parent."""
        if self._link is not None:
            self._link.close_after_fork()


def _share(link: WorkerLink, memories: Sequence[MappedMemory]) -> None:
    with suppress(WriterProcessError):  # the next save starts another process
        for memory in memories:
            link.share(memory)


def choose_worker(worker: WriterChoice, store: Store) -> tuple[Worker | None, bool]:
    """Return the writer process that writes to ``store`` (None: threads do), and whether threads write if no process
    can be started.

    Raises ``InvalidOptionError`` if a process was requested and cannot write to this store.
    """
    check_writer(worker)
    if worker == "thread":
        return None, False
    # ``"auto"`` never fails because of the process: where it is not certain that a process can open the store, threads
    # write.
    if worker == "auto":
        suits = available() and _obstacle(store, known_only=True) is None
        return (worker_for(WriterProcess()), True) if suits else (None, False)
    obstacle = _obstacle(store, known_only=False)
    if obstacle is not None:
        raise InvalidOptionError(f'writer="process": {obstacle}; writer="thread" can write there')
    return worker_for(worker if isinstance(worker, WriterProcess) else WriterProcess()), False


_KNOWN = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


def _obstacle(store: Store, *, known_only: bool) -> str | None:
    """Return the reason why another process cannot open ``store``; None if it can, as far as this process knows."""
    address = store.address
    if address is None:
        return (
            "another process cannot open this store (memory:// is this process's own; instead of Storage(filesystem=) "
            "pass a URL and storage_options=)"
        )
    protocol = address.url.partition("://")[0] if "://" in address.url else ""
    if known_only and protocol and protocol not in _KNOWN:
        return f"{protocol}:// may be something that only this process knows"
    try:
        # The options travel as JSON. What is more than data, such as a session or a credential provider, belongs to
        # this process.
        pack(address.storage.options)
    except Unsendable as error:
        return f"storage_options{error}, which cannot be handed to another process"
    return None


_workers: dict[WriterProcess, Worker] = {}
_lock = threading.Lock()


def worker_for(options: WriterProcess) -> Worker:
    """Return the worker of this process for ``options``. Starts no process."""
    with _lock:
        if options not in _workers:
            _workers[options] = Worker(options)
        return _workers[options]


def close_all() -> None:
    """End all writer processes of this process."""
    for worker in list(_workers.values()):
        worker.close()


def _forget_after_fork() -> None:
    global _workers, _lock
    for worker in _workers.values():
        worker.forget()
    _of_the_parent.append(_workers)  # so that their handles are not finalized in the child
    _workers, _lock = {}, threading.Lock()


_of_the_parent: list[Any] = []
atexit.register(close_all)
os.register_at_fork(after_in_child=_forget_after_fork)
