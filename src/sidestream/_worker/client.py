"""Who writes a save: threads of this process, or a writer process that is started when it is needed."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from .._runtime.threads import Stop, Threads, current_deadline, io_threads, result_of
from .._storage import Body, Store, Transaction
from ..errors import InvalidOptionError, WriterProcessError
from ..options import WriterChoice, WriterProcess, check_writer
from .filling import LinkFiller
from .job import Job, JobOrder
from .link import SharedSegment, WorkerLink
from .process import available
from .wire import Unsendable, pack

__all__ = ["Worker", "choose_worker", "close_all", "worker_for"]

_CLOSE_S = 1.0


class Worker:
    """The process for one set of options: there is one at most at a time, and a new one where it was lost."""

    def __init__(self, options: WriterProcess) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._link: WorkerLink | None = None
        self._users = 0

    def start(self) -> Future[None]:
        """Start it unless it is there, without waiting for more than a thread; the result is done when it is up."""
        return self._current().up

    async def up(self) -> None:
        """Start it, and wait until it is ready. Raises ``WriterProcessError``, ``DeadlineExceededError``."""
        stop = Stop()
        await io_threads().run(self._ready, stop, stop=stop)

    async def share(self, memories: Sequence[SharedSegment]) -> None:
        """Map ``memories`` there, so that no save has to, if it is up."""
        link = self._link
        if link is not None and link.up.done() and link.lost is None:
            await io_threads().run(_hand, link, memories)

    def filler(self) -> LinkFiller | None:
        """Who copies for a stage, if the process is up and may read the memory of this one."""
        link = self._link
        return LinkFiller(link) if link is not None and link.reads_memory and link.lost is None else None

    def acquire(self) -> None:
        """Somebody will come back: the process stays, once it was started, until as many have let go of it."""
        with self._lock:
            self._users += 1
            if self._link is not None:
                self._link.add_users(1)

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._link is not None:
                self._link.add_users(-1)

    @property
    def pid(self) -> int | None:
        """Of the process that is there now."""
        link = self._link
        return None if link is None or link.lost is not None else link.pid

    def write(
        self,
        transaction: Transaction,
        files: Iterable[tuple[str, Body]],
        *,
        threads: Threads,
        stop: Stop,
        fall_back: bool = False,
        url: str = "",
    ) -> None:
        """``Transaction.write``, with the same promises, in the process. This side makes the attempt; the process joins
        it.

        Raises ``WriterProcessError`` too, unless ``fall_back`` lets threads write where no process can be started.
        """
        attempt = transaction.attempt
        transaction.write((), threads=threads, stop=stop)
        if fall_back and not self._starts(stop):
            transaction.write(files, threads=threads, stop=stop)
            return
        assert transaction.address is not None
        joined = replace(attempt, kind="joined")
        order = JobOrder(transaction.address, joined, url or attempt.target, current_deadline())
        self.acquire()  # or it might end between being up and being asked
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
        """A process that is up. Raises ``WriterProcessError``, ``ClosedError``, ``DeadlineExceededError``."""
        link = self._current()
        result_of(link.up, stop, "starting the writer process")
        return link

    def _current(self) -> WorkerLink:
        with self._lock:
            if self._link is None or self._link.lost is not None:
                self._link = WorkerLink(self.options)
                self._link.add_users(self._users)
            return self._link

    def close(self) -> None:
        """End the process now; what it was writing fails. The next save starts another one."""
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
            link.end("the writer process was ended", _CLOSE_S)

    def forget(self) -> None:
        """In a forked child: the process is the parent's."""
        if self._link is not None:
            self._link.close_after_fork()


def _hand(link: WorkerLink, memories: Sequence[SharedSegment]) -> None:
    with suppress(WriterProcessError):  # the save that comes next starts another one
        for memory in memories:
            link.share(memory)


def choose_worker(worker: WriterChoice, store: Store) -> tuple[Worker | None, bool]:
    """Who writes to ``store`` (None: threads), and whether threads do where no process can be started.

    Raises ``InvalidOptionError`` where a process was asked for and cannot write there.
    """
    check_writer(worker)
    if worker == "thread":
        return None, False
    if worker == "auto":
        suits = available() and _obstacle(store, known_only=True) is None
        return (worker_for(WriterProcess()), True) if suits else (None, False)
    obstacle = _obstacle(store, known_only=False)
    if obstacle is not None:
        raise InvalidOptionError(f'writer="process": {obstacle}; writer="thread" can write there')
    return worker_for(worker if isinstance(worker, WriterProcess) else WriterProcess()), False


_KNOWN = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


def _obstacle(store: Store, *, known_only: bool) -> str | None:
    """Why another process cannot open ``store``; None if it can, as far as this one knows."""
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
        pack(address.storage.options)
    except Unsendable as error:
        return f"storage_options{error}, which cannot be handed to another process"
    return None


_workers: dict[WriterProcess, Worker] = {}
_lock = threading.Lock()


def worker_for(options: WriterProcess) -> Worker:
    """The one of this process for ``options``; nothing is started yet."""
    with _lock:
        if options not in _workers:
            _workers[options] = Worker(options)
        return _workers[options]


def close_all() -> None:
    """End every writer process of this one."""
    for worker in list(_workers.values()):
        worker.close()


def _forget_after_fork() -> None:
    global _workers, _lock
    for worker in _workers.values():
        worker.forget()
    _of_the_parent.append(_workers)  # their handles shall not be finalized here
    _workers, _lock = {}, threading.Lock()


_of_the_parent: list[Any] = []
atexit.register(close_all)
os.register_at_fork(after_in_child=_forget_after_fork)
