"""The handling of preemption: a signal, a save within the grace time, and the end that the user has chosen."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from .._engine.handle import Waitable
from .._runtime.tasks import create_owned_task
from ..errors import InvalidOptionError, printable_lines
from ..options import Then, check_choice, check_seconds

__all__ = ["Preemption", "Then"]

_log = logging.getLogger("sidestream")


class Preemption:
    """The handler of some signals on the running loop. At the first signal it runs ``work`` for at most ``grace_s``,
    and then ends the program. Another signal ends it at once. It catches nothing before ``install``. ``cancel`` cancels
    what is in progress, for which the end of the program would wait."""

    def __init__(
        self,
        signals: Sequence[int],
        work: Callable[[], Coroutine[Any, Any, None]],
        cancel: Callable[[], None],
        *,
        grace_s: float,
        then: Then,
        exit_code: int | None,
    ) -> None:
        check_seconds("grace_s", grace_s)
        check_choice("then", then, Then)
        if threading.current_thread() is not threading.main_thread():
            raise InvalidOptionError(
                "on_preemption: signals reach the main thread only, and this loop runs in another one"
            )
        self.requested: int | None = None
        self._signals = tuple(signals)
        self._work = work
        self._cancel = cancel
        self._grace_s = grace_s
        self._then: Then = then
        self._exit_code = exit_code
        self._task: asyncio.Task[None] | None = None
        self._saved: Waitable[None] = Waitable("the save on preemption")
        self._ended = False
        self._loop = asyncio.get_running_loop()

    def install(self, former: Preemption | None = None) -> None:
        """Catch the signals, in place of ``former``. If one of them cannot be caught, ``former`` stays in place."""
        for number in self._signals:
            try:
                self._loop.add_signal_handler(number, self._on_signal, number)
            except (ValueError, OSError, RuntimeError, NotImplementedError, TypeError) as error:
                self.uninstall()
                if former is not None:
                    former.install()
                raise InvalidOptionError(f"on_preemption: signal {number!r} cannot be caught here: {error}") from error
        # After the new handlers are in place, so that there is no moment in which a signal ends the program.
        if former is not None:
            former.uninstall(but=self._signals)

    def uninstall(self, but: Sequence[int] = ()) -> None:
        """Restore the default actions of the signals, ``but`` for these, the first time that this is called. Work that
        has begun continues. On another loop than that of the handlers it is done a little later."""
        if asyncio._get_running_loop() is not self._loop:
            with suppress(RuntimeError):  # the loop is closed, and its handlers are gone
                self._loop.call_soon_threadsafe(self.uninstall, but)
            return
        signals, self._signals = self._signals, ()
        for number in signals:
            if number in but:
                continue
            try:
                self._loop.remove_signal_handler(number)
            except (ValueError, OSError, TypeError):
                continue

    async def ended(self) -> None:
        """Wait until work that has begun has ended. Called on any loop."""
        if self._task is not None:
            await self._saved.ended()

    def _on_signal(self, number: int) -> None:
        # The second signal ends at once: its sender does not want to wait for the save.
        if self.requested is not None:
            self._cancel_unless_staying()
            self._end(number)
            return
        self.requested = number
        self._task = create_owned_task(self._run(number), "sidestream preemption")
        self._task.add_done_callback(
            lambda _: self._saved.succeed(None)
        )  # also if it was cancelled before its first step

    async def _run(self, number: int) -> None:
        saving = create_owned_task(self._save(), "sidestream preemption, saving")
        done, _ = await asyncio.wait([saving], timeout=self._grace_s)
        if not done:
            _log.error("the grace time of %g s is over, and not everything has been saved", self._grace_s)
            saving.cancel()  # not awaited: a thread that hangs in a system call would delay the end
            self._cancel_unless_staying()
        self._saved.succeed(None)
        self._end(number)

    async def _save(self) -> None:
        try:
            await self._work()
        except Exception as error:  # the program ends in any case
            _log.error("the save on preemption failed: %s: %s", type(error).__name__, printable_lines(str(error)))

    def _cancel_unless_staying(self) -> None:
        if self._then != "stay":
            self._cancel()

    def _end(self, number: int) -> None:
        if self._ended:  # a second exit would interrupt the closing of the loop
            return
        self._ended = True
        if self._then == "exit":
            code = 128 + number if self._exit_code is None else self._exit_code
            self._loop.call_soon(_exit, code)  # not raised in the task, which would log it as a failure of the task
        elif self._then == "signal":
            self.uninstall()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _exit(code: int) -> None:
    raise SystemExit(code)
