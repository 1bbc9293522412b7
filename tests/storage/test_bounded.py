"""Requests of fsspec's file objects, which are ended however early the stop comes."""

from __future__ import annotations

import threading

import fsspec
from fsspec.asyn import sync

from sidestream._storage.clients.bounded import Bounded


async def retrying(send: object) -> None:
    raise AssertionError("nothing is sent")


def test_a_request_that_is_stopped_before_its_first_step_is_ended() -> None:
    bounded = Bounded(fsspec.filesystem("http"), 3600.0, retrying)  # type: ignore[arg-type]
    bounded.stop()

    async def request() -> None:
        await bounded._loop.create_future()

    done = threading.Event()

    def wait() -> None:
        sync(bounded, request)
        done.set()

    threading.Thread(target=wait, daemon=True).start()
    assert done.wait(60)
    assert bounded.ended == "it was stopped"
