"""What users do with object stores, on every client."""

from __future__ import annotations

import threading
from typing import Any

import torch
from _places import Place, s3_place
from _s3_server import Request, S3Server
from keywords import for_load, for_run, for_save
from states import assert_same

import sidestream
from sidestream import errors


def state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {
        "large": torch.randn(3 << 19),
        "rows": torch.randn(1024, 1024),
        "step": seed,
    }


async def test_an_export_beside_a_save(place_on_s3: Place) -> None:
    """From the snapshot, in several files and in parts; a second export to the same prefix is refused."""
    place, server = place_on_s3, place_on_s3.server
    assert server is not None
    export = sidestream.HF(place.url("hf"), dtype=torch.bfloat16, max_shard_bytes=3 << 20, **place.keywords)
    info = await sidestream.save(state(4), place.url(), export=export, **for_save(**place.keywords))
    assert len(info.exports[0].files) > 2
    found = await (await sidestream.open_checkpoint(place.url("hf"), **place.keywords)).state_dict()
    assert torch.equal(found["large"], state(4)["large"].to(torch.bfloat16))
    assert torch.equal(found["rows"], state(4)["rows"].to(torch.bfloat16))
    again = await sidestream.save(state(5), place.url("again"), export=export, **for_save(**place.keywords))
    assert isinstance(again.exports[0], errors.CheckpointExistsError)
    assert server.uploads == {}


async def test_row_slices_cost_what_they_hold(place_on_s3: Place) -> None:
    place, server = place_on_s3, place_on_s3.server
    assert server is not None
    source = {"rows": torch.randn(8192, 1024), "other": torch.randn(1 << 18)}
    await sidestream.save(source, place.url(), **for_save(**place.keywords))
    opened = await sidestream.open_checkpoint(place.url(), **place.keywords)
    server.log.clear()
    rows = await opened.tensor("rows", slice(5000, 8000))
    assert torch.equal(rows, source["rows"][5000:8000])
    fetched = [one.asked for one in server.log if one.kind == "get"]
    assert len(server.log) == len(fetched) <= 2
    nbytes = sum(end - start for start, end in filter(None, fetched))
    block = 1 << 20
    wanted = -(-8000 * 4096 // block) * block - 5000 * 4096 // block * block
    assert nbytes <= 1.05 * wanted


async def test_a_load_has_as_many_requests_in_progress_as_the_policy_says(s3: S3Server) -> None:
    most = 9
    place = s3_place(s3, "obstore", concurrency=most)
    state = {str(number): torch.full((1 << 17,), float(number)) for number in range(most)}
    export = sidestream.HF(place.url("hf"), max_shard_bytes=1 << 19, **place.keywords)  # a file for each tensor
    await sidestream.save(state, place.url(), export=export, **for_save(**place.keywords))
    together, begun = threading.Barrier(most), list[Request]()

    def wait_for_the_others(request: Request) -> Any:
        if (
            request.kind != "get"
            or not request.asked
            or request.asked[1] - request.asked[0] < 1 << 18
            or len(begun) == most
        ):
            return None
        begun.append(request)
        return lambda: together.wait(15)  # less than the limit of a request

    s3.fault = wait_for_the_others
    target = {name: torch.zeros(1 << 17) for name in state}
    await sidestream.load(target, place.url("hf"), **for_load(**place.keywords))
    assert_same(state, target)
    assert len(begun) == most
    assert not together.broken


async def test_listings_are_never_stale(s3: S3Server) -> None:
    """A file system of the user's own, with the cache of listings that s3fs has by default."""
    import s3fs

    filesystem = s3fs.S3FileSystem(**s3.options)
    writer = s3_place(s3, "obstore")
    async with sidestream.Checkpointer(f"{s3.bucket}/run", storage=sidestream.Storage(filesystem=filesystem)) as reader:
        assert await reader.steps() == []
        for step in (1, 2):
            async with sidestream.Checkpointer(writer.base, **for_run(**writer.keywords)) as checkpoints:
                await checkpoints.save({"t": torch.ones(4)}, step=step)
            assert await reader.latest() == step
