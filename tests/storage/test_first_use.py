"""What the first use of the package and of an object store imports, when, and in which thread."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _s3_server import S3Server

from sidestream._runtime.imports import collecting_later

FINDER = """
import sys, threading

imported = []


class Finder:
    def find_spec(self, name, path=None, target=None):
        frame, searched = sys._getframe(), False
        while frame is not None:
            searched |= "importlib.util" in frame.f_code.co_filename.replace("/", ".")
            frame = frame.f_back
        if not searched:  # whether a package is there
            imported.append((name, threading.current_thread() is threading.main_thread()))
"""

PROGRAM = """
import asyncio, json, sys

import torch
import sidestream

LATER = ("dcp", "integrations", "observability")
assert all(name in vars(sidestream) for name in sidestream.__all__ if name not in LATER)
HEAVY = ("aiobotocore", "aiohttp", "botocore", "s3fs", "obstore", "gcsfs", "adlfs", "typer", "rich",
         "torch.distributed.checkpoint", "torch._dynamo", "watchfiles", "fsspec.implementations.memory",
         "pytest", "sidestream.testing")
def heavy():
    return [name for name in HEAVY if name in sys.modules]


async def main(url, options):
    found = {"after_import": heavy()}
    sys.meta_path.insert(0, Finder())
    state = {"w": torch.ones(4 << 20), "v": torch.ones(8)}
    if "prewarm" in sys.argv:
        async with sidestream.Checkpointer(url, storage_options=options) as run:
            try:
                await run.prewarm(state)
            except Exception as error:
                print(json.dumps({"raised": type(error).__name__}))
                return
            found["prewarmed"] = heavy()
            imported.clear()
            await run.save(state, step=1)
    else:
        await sidestream.save(state, url + "/first", storage_options=options)
    found |= {"after_save": heavy(), "imported": imported}
    print(json.dumps(found))


asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def output_of(program: str, *words: str) -> str:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, *words]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout


def ran(url: str, options: Any = None, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(output_of(FINDER + PROGRAM, url, json.dumps(options), *more))
    return found


def test_the_first_local_save_imports_nothing(tmp_path: Path) -> None:
    found = ran(str(tmp_path))
    assert found["after_import"] == found["after_save"] == []
    assert found["imported"] == []


def test_clients_of_an_object_store_are_imported_in_other_threads(s3: S3Server) -> None:
    found = ran(f"s3://{s3.bucket}/run", s3.options)
    assert found["after_import"] == []
    assert "obstore" in found["after_save"]
    assert "s3fs" not in found["after_save"]
    assert [name for name, on_the_loop in found["imported"] if on_the_loop] == []


CACHED = """
import asyncio, json, sys

import sidestream, torch


async def main(url, options, cache):
    storage, state = sidestream.Storage(options, policy=sidestream.StorePolicy(cache_dir=cache)), {"w": torch.ones(8)}
    sys.meta_path.insert(0, Finder())
    await sidestream.save(state, url, storage=storage)
    await sidestream.load(state, url, storage=storage)


asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]))
print(json.dumps(imported))
"""


def test_a_cache_imports_its_client_and_its_locks_in_other_threads(s3: S3Server, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    imported = json.loads(output_of(FINDER + CACHED, f"s3://{s3.bucket}/run", json.dumps(s3.options), str(cache)))
    assert {"s3fs", "aiobotocore", "filelock"} <= {name for name, _ in imported}
    assert [name for name, on_the_loop in imported if on_the_loop] == []
    assert list(cache.iterdir())


CALLS = """
import asyncio, json, sys

import sidestream, torch


async def main(home, bucket, options):
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "step": 3, "random": torch.get_rng_state()}
    storage = sidestream.Storage(options)
    small = sidestream.SaveOptions(digest="blake3")
    sys.meta_path.insert(0, Finder())
    for root in (f"{home}/local", f"s3://{bucket}/runs"):
        there = {"storage": storage} if "://" in root else {}
        await sidestream.save(state, f"{root}/a", options=small, **there)
        await sidestream.load(state, f"{root}/a", **there)
        await sidestream.verify(f"{root}/a", **there)
        checkpoint = await sidestream.open_checkpoint(f"{root}/a", **there)
        await checkpoint.state_dict()
        target = f"{home}/{len(root)}.safetensors"
        await sidestream.convert(f"{root}/a", target, select=["model.*"], **there)
        await sidestream.load({"model.weight": model.weight.detach()}, target, allow_unexpected=True)
        await sidestream.copy(f"{root}/a", f"{home}/copy-{len(root)}", **there)
        await sidestream.remove(f"{root}/a", **there)
        export = sidestream.HF(f"{home}/export-{len(root)}/{{step}}", select=["model.*"])
        async with sidestream.Checkpointer(f"{root}/b", keep=sidestream.KeepLast(1), export=export, **there) as run:
            await run.save(state, step=1)
            new = asyncio.ensure_future(anext(run.watch(after=1)))
            while "watchfiles" not in sys.modules:  # it waits for changes of the directory
                await asyncio.sleep(0.01)
            pending = run.async_save(state, step=2)
            await pending
            await pending.exports[0]
            assert await new == 2
            await run.restore(state)
    await sidestream.save(state, f"{home}/p", options=sidestream.SaveOptions(writer="process"))
    async with sidestream.AsyncStager() as stager:
        (await stager.stage(model.state_dict())).release()


asyncio.run(main(*sys.argv[1:3], json.loads(sys.argv[3])))
print(json.dumps(imported))
"""


def test_no_first_call_imports_anything_on_the_loop(s3: S3Server, tmp_path: Path) -> None:
    imported = json.loads(output_of(FINDER + CALLS, str(tmp_path), s3.bucket, json.dumps(s3.options)))
    assert {"obstore", "watchfiles"} <= {name for name, _ in imported}
    assert [name for name, on_the_loop in imported if on_the_loop] == []


def test_the_package_brings_neither_dcp_nor_the_command_line() -> None:
    """Torch's own DCP takes as long to import as everything else together."""
    brought = set(output_of("import sys, sidestream; print(*sys.modules)").split())
    assert {"sidestream.checkpointer", "sidestream.blocking", "torch"} <= brought
    optional = {"torch.distributed.checkpoint", "torch._dynamo", "typer", "rich", "obstore", "s3fs", "watchfiles"}
    assert brought & optional == set()


def test_prewarm_imports_and_connects_what_the_first_save_uses(s3: S3Server) -> None:
    found = ran(f"s3://{s3.bucket}/run", s3.options, "prewarm")
    assert "obstore" in found["prewarmed"]
    assert found["imported"] == []


def test_prewarm_says_that_a_store_refuses_the_run(s3: S3Server) -> None:
    found = ran(f"s3://{s3.bucket}/run", {**s3.options, "key": "another"}, "prewarm")
    assert found == {"raised": "AccessDeniedError"}


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_collection_is_put_off_until_the_last_import_ends(thresholds: tuple[int, int, int]) -> None:
    with collecting_later():
        with pytest.raises(ImportError), collecting_later():
            raise ImportError
        assert gc.get_threshold()[0] == 0
        assert gc.isenabled()
    assert gc.get_threshold() == thresholds


def test_thresholds_that_the_program_sets_meanwhile_are_kept(thresholds: tuple[int, int, int]) -> None:
    with collecting_later():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_a_program_without_automatic_collection_has_none_afterwards(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(0, 10, 10)
    with collecting_later():
        pass
    assert gc.get_threshold() == (0, 10, 10)
