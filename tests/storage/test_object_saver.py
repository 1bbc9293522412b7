"""Object storage, written by a writer process: through both clients, with what happens to it on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from _places import Place
from _s3_server import S3Server
from keywords import for_save
from states import assert_same

import sidestream
from sidestream._worker.client import close_all, worker_for
from sidestream.errors import InvalidOptionError, SidestreamError


def state(value: float, mib: int = 6) -> dict[str, torch.Tensor]:
    """Each tensor is a file of two parts or more, of 5 MiB each."""
    return {f"t{number}": torch.full((mib << 18,), value + number) for number in range(2)}


@pytest.fixture(autouse=True)
def _own_process() -> Iterator[None]:
    close_all()
    yield
    close_all()


async def back(place: Place, name: str) -> object:
    return await (await sidestream.open_checkpoint(place.url(name), **place.keywords)).state_dict()


async def test_round_trip_and_overlapping_saves(place_on_s3: Place) -> None:
    place = place_on_s3
    saves = [
        sidestream.async_save(state(float(n)), place.url(f"c{n}"), **for_save(writer="process", **place.keywords))
        for n in range(2)
    ]
    await asyncio.gather(*saves)
    for number in range(2):
        assert_same(state(float(number)), await back(place, f"c{number}"))
        assert (await sidestream.verify(place.url(f"c{number}"), **place.keywords)).ok


async def test_killed_in_the_middle_of_an_upload(place_on_s3: Place, s3: S3Server) -> None:
    """A new process does the upload once more."""
    place = place_on_s3
    saver = sidestream.WriterProcess(max_bytes_per_second=10e6)
    async with sidestream.AsyncStager(backing="shared") as stager:
        pending = sidestream.async_save(
            state(1.0), place.url("c"), stager=stager, **for_save(writer=saver, **place.keywords)
        )
        while not s3.uploads and not pending.done():
            await asyncio.sleep(0.005)
        pid = worker_for(saver).pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await pending
    assert_same(state(1.0), await back(place, "c"))


async def test_cancelled_in_the_middle_of_an_upload(place_on_s3: Place, s3: S3Server) -> None:
    place = place_on_s3
    saver = sidestream.WriterProcess(max_bytes_per_second=5e6)
    async with sidestream.AsyncStager(backing="shared") as stager:
        pending = sidestream.async_save(  # at that rate it takes 10 s, and its first part 2 s
            state(1.0, mib=24), place.url("c"), stager=stager, **for_save(writer=saver, **place.keywords)
        )
        # Until a part has arrived: an upload whose begin has no answer yet is left to the bucket's lifecycle rule.
        while not any(one.parts for one in dict(s3.uploads).values()) and not pending.done():
            await asyncio.sleep(0.005)
        pending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pending
        await pending.ended()
    assert s3.uploads == {}
    with pytest.raises(SidestreamError):
        await back(place, "c")


async def test_a_file_system_that_can_be_made_again(s3: S3Server) -> None:
    filesystem = fsspec.filesystem("s3", **s3.options)
    url = f"{s3.bucket}/handed/c"
    await sidestream.save(
        state(2.0),
        url,
        storage=sidestream.Storage(filesystem=filesystem),
        options=sidestream.SaveOptions(writer="process"),
    )
    checkpoint = await sidestream.open_checkpoint(url, storage=sidestream.Storage(filesystem=filesystem))
    assert_same(state(2.0), await checkpoint.state_dict())


async def test_a_cache_directory_that_is_a_path(s3: S3Server, tmp_path: Path) -> None:
    storage = sidestream.Storage(s3.options, policy=sidestream.StorePolicy(cache_dir=tmp_path / "cache"))
    url = f"s3://{s3.bucket}/cached/c"
    await sidestream.save(state(3.0), url, storage=storage, options=sidestream.SaveOptions(writer="process"))
    assert_same(state(3.0), await (await sidestream.open_checkpoint(url, storage=storage)).state_dict())
    assert any((tmp_path / "cache").iterdir())
    with pytest.raises(InvalidOptionError, match="cache_dir=3"):
        sidestream.StorePolicy(cache_dir=3)  # type: ignore[arg-type]
