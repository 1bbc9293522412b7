"""Staging through ``torch.accelerator``, as for devices that are not CUDA, from the simulated ones."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import cudasim
import pytest
import torch

from sidestream._staging import AsyncStager, DeviceEngine, TorchDriver
from sidestream.options import StageMode

LARGE = 1 << 21  # elements: beyond what is coalesced


def fill(state: dict[str, torch.Tensor], value: float) -> None:
    for tensor in state.values():
        tensor.fill_(value)


def values(copies: Any) -> set[float]:
    return {float(one) for tensor in copies.values() for one in tensor.unique()}


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("mode", get_args(StageMode))
def test_the_copy_is_the_state_at_the_call(mode: StageMode, device: int) -> None:
    """Work that was enqueued before the call is in the copy, and what is written behind the fence is not."""

    async def run() -> None:
        torch.accelerator.set_device_index(device)
        whole = torch.zeros(LARGE, device="cuda")
        state = {
            "whole": whole,
            "view": whole[5:9],
            "small": torch.zeros(7, device="cuda", dtype=torch.bfloat16),
            "strided": torch.zeros(300, 400, device="cuda").t(),
        }
        torch.accelerator.synchronize()
        registrations = cudasim.state()["registrations"]
        async with AsyncStager(budget_bytes=1 << 28, mode=mode, engine=DeviceEngine(TorchDriver("cuda"))) as stager:
            for value in range(1, 9):
                torch.cuda._sleep(10**7)
                fill(state, value)
                future = stager.stage(state)
                stager.fence()
                fill(state, -1.0)
                copies = await future
                assert values(copies) == {value}
                assert copies["view"].untyped_storage().data_ptr() == copies["whole"].untyped_storage().data_ptr()
                copies.release()
                del copies, future
            assert cudasim.state()["registrations"] == registrations
            assert stager.statistics().registered_bytes == 0 < stager.statistics().reserved_bytes

    try:
        asyncio.run(run())
    finally:
        torch.accelerator.set_device_index(0)
    assert cudasim.state()["violations"] == "0"


def test_without_a_fence_the_copy_has_later_writes() -> None:
    """The test above could fail."""

    async def run() -> None:
        source = torch.ones(LARGE, device="cuda")
        torch.accelerator.synchronize()
        engine = DeviceEngine(TorchDriver("cuda"))
        async with AsyncStager(budget_bytes=1 << 28, engine=engine, max_bytes_per_second=4e6) as stager:
            future = stager.stage({"t": source})
            source.fill_(2.0)
            torch.accelerator.synchronize()
            assert 2.0 in values(await future)

    asyncio.run(run())
