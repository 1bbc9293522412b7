"""Calls that have to get somewhere before their deadline passes, on a machine of any speed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sidestream.errors import SidestreamError


async def late(call: Callable[[float], Awaitable[object]], arrived: Callable[[], object]) -> SidestreamError:
    """Return what ``call(timeout_s)`` raises in the first try in which ``arrived()`` before its deadline. Each try
    has four times as long as the one before it: a fixed time is too short on some machine and too long on all others.
    """
    for timeout_s in (0.5, 2.0, 8.0, 32.0, 128.0):
        try:
            await call(timeout_s)
        except SidestreamError as error:
            if arrived():
                return error
        else:
            raise AssertionError("it ended before its deadline")
    raise AssertionError("it never got there")
