"""``Live``: weights that are read by requests in any thread, and exchanged between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from .._engine.calls import in_operation
from .._runtime.public import Displayed, Table, public, readable_bytes
from .._runtime.threads import ThreadFuture, io_threads
from ..errors import (
    ClosedError,
    DtypeMismatchError,
    InvalidOptionError,
    ShapeMismatchError,
    SidestreamError,
    SkippedError,
    StaleVersionError,
    StateMismatchError,
    UnexpectedKeysError,
)
from ..options import plain_integer
from .matching import Difference, found_for, raise_mismatch
from .refusals import problem_of
from .shells import Place, Shell, Shells


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """What is served: one reference to this record decides it. ``since`` is by ``time.monotonic()``."""

    shell: Shell
    stamp: str | None
    version: int | None
    save_id: str
    since: float


@public
@dataclass(frozen=True, slots=True, repr=False)
class LiveHealth(Displayed):
    """The state of a ``Live``.

    Attributes:
        stamp: The stamp of the version that is served; None before the first.
        save_id: The id of the save that wrote it.
        served_s: The seconds since it was put in place.
        swaps: How many versions have been put in place.
        readings: How many readings are open.
        old_versions: How many older versions are held by readings.
        oldest_reading: The reading that holds the oldest version: its stamp, age, thread and task. None if every
            reading uses the newest version.
        waiting: Whether a version waits until such readings end.
        own_bytes: The bytes of device memory that the copies of the weights have for themselves.
    """

    stamp: str | None
    save_id: str
    served_s: float
    swaps: int
    readings: int
    old_versions: int
    oldest_reading: str | None
    waiting: bool
    own_bytes: int

    def _summary(self) -> str:
        waits = ", a version waits" if self.waiting else ""
        return f"{self.stamp or 'no version'} for {self.served_s:.0f} s, {self.readings} readings{waits}"

    def _table(self) -> Table:
        rows = [
            ["versions served so far", f"{self.swaps:,}"],
            ["older versions held by readings", f"{self.old_versions}"],
            ["oldest of these readings", self.oldest_reading or "none"],
            ["device memory of the copies", readable_bytes(self.own_bytes)],
        ]
        return Table(("what", "value"), rows, len(rows))


@public
class Live:
    """Weights that requests read while newer ones take their place.

    It serves copies of ``model``, which it never changes. Each reading uses the weights of one version from its
    beginning to its end. Make it before the program serves, or in a thread, because copying a module takes time. Call
    ``model.eval()`` first: the copies keep its mode.

    Args:
        model: A module, or a mapping of names to tensors. Only its structure is needed: with ``torch.device("meta")``
            it takes no memory. A module that holds weights outside of its parameters and buffers is refused.
        max_old: How many older versions readings may hold before the next version waits for them. There are
            ``max_old + 2`` copies of the module. On the host they share the memory of the versions; on a device each
            copy has memory of its own (``health().own_bytes``).
        prepare: Called once with each copy, for example ``lambda copy: copy.compile()``.

    Raises:
        UnsupportedModuleError: The module has weights that cannot be exchanged. The message names them.
        InvalidOptionError: ``max_old`` is not a count.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        max_old: int = 1,
        prepare: Callable[[torch.nn.Module], object] | None = None,
    ) -> None:
        if type(max_old) is not int or max_old < 0:
            raise InvalidOptionError(f"max_old={max_old!r} has to be a number of versions, 0 or more")
        self._shells = Shells(model, max_old + 2, prepare)
        self._lock = threading.Lock()
        self._served = ServedVersion(self._shells.all[0], None, None, "", time.monotonic())
        self._swaps = 0
        self._next: ThreadFuture[Shell] | None = None
        """What waits for a free shell."""
        self._changes: set[ThreadFuture[None]] = set()
        """What waits for other weights."""

    # --- reading ---

    @property
    def stamp(self) -> str | None:
        """The stamp of the version that is served now, such as ``"step-300"``. None before the first version. A reading
        has its own."""
        return self._served.stamp

    def reading(self, *, min_version: int | None = None) -> ServedReading:
        """Return a reading of the weights that are served when it is entered: ``with live.reading() as reading: ...``.

        It may be entered in any thread. ``async with`` waits for ``min_version``, ``with`` does not.

        Args:
            min_version: The lowest version to read. That of a step of a run is its number.

        Returns:
            The reading.

        Raises:
            InvalidOptionError: ``min_version`` is not an integer.
        """
        if min_version is not None:
            min_version = plain_integer(min_version)
            if type(min_version) is not int:
                raise InvalidOptionError(f"min_version={min_version!r} has to be an integer")
        return ServedReading(self, min_version)

    def _enter(self, reading: ServedReading, wanted: int | None) -> ServedVersion:
        """Pin the shell that is served. Raises ``StaleVersionError``."""
        with self._lock:
            served = self._served
            version = served.version
            if wanted is None or (version is not None and version >= wanted):
                served.shell.readings[reading] = None
                return served
        raise StaleVersionError(
            f"version {wanted} is not served yet, {served.stamp or 'no version'} is: enter the reading with async with "
            "to wait for it, or answer that the weights are too old",
            served=version,
            wanted=wanted,
        )

    def _exit(self, reading: ServedReading, shell: Shell) -> None:
        try:
            with self._lock:
                self._shells.mark_used(shell)  # under the lock, so that the last event of a stream is the last one here
        finally:
            with self._lock:
                shell.readings.pop(reading, None)
                waiter = self._claim_for_next(shell)
            self._freed(waiter, shell)

    async def _changed(self, served: ServedVersion | None) -> None:
        """Wait until other weights are served than ``served``, on any loop."""
        changed: ThreadFuture[None] = ThreadFuture()
        with self._lock:
            if self._served is not served:
                return
            self._changes.add(changed)
        try:
            await asyncio.shield(asyncio.wrap_future(changed))
        finally:
            with self._lock:
                self._changes.discard(changed)

    # --- exchanging ---

    async def install(
        self, tensors: Mapping[str, torch.Tensor], *, stamp: str, version: int | None = None, save_id: str = ""
    ) -> None:
        """Serve these weights from now on, when a copy is free of readings.

        On the host the tensors are not copied: they belong to this object from now on and must not change. If another
        call comes while this one waits, this one gives way; the step of a follower comes after it. A cancel leaves the
        weights as they are, or serves the new ones as a whole.

        Args:
            tensors: A tensor for each name of the state dict; one suffices for names that are tied.
            stamp: What readings of these weights have as their ``stamp``.
            version: The number that ``min_version`` is compared with.
            save_id: The id of the save that wrote them.

        Raises:
            StateMismatchError: A name is missing or unknown, or a tensor has another shape, dtype or device; nothing
                was changed.
            SkippedError: A newer version took its place while it waited.
        """
        if type(stamp) is not str or not stamp:
            raise InvalidOptionError(f"stamp={stamp!r} has to be a text")

        async def work() -> None:
            found = await io_threads().run(self._matched, tensors)
            shell = await self._claim()
            try:
                await self._serve(shell, found, stamp, version, save_id)
            finally:
                self._give_back(shell)

        await in_operation(work, "install", ends=False)

    def _matched(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors by the first names of their places. Raises the ``StateMismatchError`` of all
        differences."""
        found, problems = found_for(self._shells.places, tensors, _difference)
        problems |= {f"{name}: unknown": UnexpectedKeysError for name in tensors if name not in self._shells.leaders}
        if problems:
            raise_mismatch("these weights do not fit the state dict of the model", problems)
        return {leader: tensors[name] for leader, name in found.items()}

    async def _claim(self) -> Shell:
        """Wait for a shell that no reading uses, on any loop, and claim it. Raises ``SkippedError`` if another one
        wants a shell meanwhile. A cancel claims nothing."""
        with self._lock:
            shell = next(filter(self._is_free, self._shells.all), None)
            if shell is not None:
                shell.claimed = True
                return shell
            older, self._next = self._next, (mine := ThreadFuture[Shell]())
        if older is not None:
            older.set_exception(SkippedError("a newer version took the place of this one, which waited for readings"))
        try:
            return await asyncio.shield(asyncio.wrap_future(mine))
        except BaseException:  # a cancel, ``SkippedError``, or the end of a coroutine whose loop was dropped
            with self._lock:
                if self._next is mine:
                    self._next = None
                    raise
            mine.add_done_callback(self._give_back_result)
            raise

    def _give_back_result(self, claimed: Any) -> None:
        if claimed.exception() is None:
            self._give_back(claimed.result())

    def _give_back(self, shell: Shell) -> None:
        """End a claim, whether the shell is served now or not."""
        with self._lock:
            shell.claimed = False
            waiter = self._claim_for_next(shell)
        _resolve(waiter, shell)

    def _is_free(self, shell: Shell) -> bool:
        return not (shell.claimed or shell.readings or shell is self._served.shell)

    def _claim_for_next(self, shell: Shell) -> ThreadFuture[Shell] | None:
        """Claim a shell for what waits, if it is free. Called with the lock; the result is resolved without it."""
        if self._next is None or not self._is_free(shell):
            return None
        waiter, self._next = self._next, None
        shell.claimed = True
        return waiter

    async def _clear(self, shell: Shell) -> None:
        """Drop the memory of the version that a claimed shell had, so that the next one can use it."""
        await io_threads().run(self._shells.clear, shell)

    def _freed(self, waiter: ThreadFuture[Shell] | None, shell: Shell) -> None:
        """Give a shell that is not used any more to what waits for it, or drop its memory, in a thread."""
        _resolve(waiter, shell)
        if waiter is None and shell.filled and self._is_free(shell):
            with suppress(RuntimeError, SidestreamError):  # without a thread it stays until the next version comes
                io_threads().submit(self._clear_unused, shell)

    def _clear_unused(self, shell: Shell) -> None:
        with shell.changing:  # what claims it now fills it later
            with self._lock:
                free = self._is_free(shell)
            if free:
                self._shells.clear(shell)

    async def _serve(
        self, shell: Shell, tensors: Mapping[str, torch.Tensor], stamp: str, version: int | None, save_id: str
    ) -> None:
        """Put ``tensors`` into a claimed shell, and let readings that begin from now on use it. Part of an
        operation."""
        await self._shells.fill(shell, tensors)
        served = ServedVersion(shell, stamp, version, save_id, time.monotonic())
        with self._lock:
            before, self._served = self._served, served
            self._swaps += 1
            changes, self._changes = self._changes, set()
            waiter = self._claim_for_next(before.shell)
        for changed in changes:
            changed.set_result(None)
        self._freed(waiter, before.shell)

    # --- state ---

    def health(self) -> LiveHealth:
        """Return the state: what is served, since when, and which readings hold older versions."""
        with self._lock:
            served, shells = self._served, self._shells.all
            old = [shell for shell in shells if shell.readings and shell is not served.shell]
            first = [next(iter(shell.readings)) for shell in old]
            oldest = min(first, key=lambda one: one.since, default=None)
            return LiveHealth(
                stamp=served.stamp,
                save_id=served.save_id,
                served_s=time.monotonic() - served.since,
                swaps=self._swaps,
                readings=sum(len(shell.readings) for shell in shells),
                old_versions=len(old),
                oldest_reading=None if oldest is None else oldest._described(),
                waiting=self._next is not None,
                own_bytes=self._shells.own_bytes,
            )

    def __repr__(self) -> str:
        return f"<Live {self.stamp or 'without a version'}, {len(self._shells.all)} copies>"


def _resolve(waiter: ThreadFuture[Shell] | None, shell: Shell) -> None:
    if waiter is not None:
        waiter.set_result(shell)


def _difference(tensor: torch.Tensor, place: Place) -> Difference | None:
    if problem := problem_of(tensor):
        return problem, StateMismatchError
    if tensor.shape != place.shape:
        return f"shape {list(tensor.shape)}, and {list(place.shape)} is served", ShapeMismatchError
    if tensor.dtype != place.dtype:
        return f"dtype {tensor.dtype}, and {place.dtype} is served", DtypeMismatchError
    if place.device.type == "cpu" and tensor.device.type != "cpu":
        return f"on {tensor.device}, and {place.device} is served", StateMismatchError
    return None


@public
class ServedReading:
    """The weights of one version, for one request. ``Live.reading`` returns it, and it is entered once.

    Until the end of the ``with`` block nothing changes its weights. Do not use them afterwards: the memory gets those
    of another version.
    """

    def __init__(self, live: Live, min_version: int | None) -> None:
        self._live = live
        self._wanted = min_version
        self._version: ServedVersion | None = None
        self._open = False
        self.since = 0.0
        self._thread = ""
        self._task: asyncio.Task[Any] | None = None

    @property
    def stamp(self) -> str | None:
        """The stamp of these weights, such as ``"step-300"`` or ``"step-300.g2"``. None before the first version."""
        return self._entered().stamp

    @property
    def version(self) -> int | None:
        """Their number: that of the step. None before the first version."""
        return self._entered().version

    @property
    def save_id(self) -> str:
        """The id of the save that wrote them. Empty if another writer did."""
        return self._entered().save_id

    @property
    def module(self) -> Any:
        """The copy of the module with these weights."""
        module = self._usable().shell.module
        if module is None:
            raise InvalidOptionError("this Live was made from a mapping of tensors, which has no module: use tensors")
        return module

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights by name, as in the state dict."""
        return MappingProxyType(self._usable().shell.tensors)

    def __enter__(self) -> ServedReading:
        if self._version is not None:
            raise ClosedError("this reading was entered before: call reading() for each request")
        self.since = time.monotonic()
        self._thread = threading.current_thread().name
        self._task = None if asyncio._get_running_loop() is None else asyncio.current_task()
        self._version = self._live._enter(self, self._wanted)
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open, self._task = False, None
        self._live._exit(self, self._entered().shell)

    async def __aenter__(self) -> ServedReading:
        while True:
            served = self._live._served
            try:
                return self.__enter__()
            except StaleVersionError:
                await self._live._changed(served)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

    def _entered(self) -> ServedVersion:
        if self._version is None:
            raise ClosedError("enter the reading first: with live.reading() as reading: ...")
        return self._version

    def _usable(self) -> ServedVersion:
        version = self._entered()
        if not self._open:
            raise ClosedError("this reading has ended, and its weights may be those of another version by now")
        if version.stamp is None and self._live._shells.empty:
            raise StaleVersionError("there are no weights before the first version: the model was on the meta device")
        return version

    def _described(self) -> str:
        task = self._task
        where = self._thread if task is None else f"{self._thread}, {task.get_name()}"
        return f"{self._entered().stamp or 'no version'} for {time.monotonic() - self.since:.0f} s in {where}"
