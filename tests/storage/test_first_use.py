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

from sidestream._runtime.imports import importing

PROGRAM = """
import asyncio, gc, json, sys, threading

import torch
import sidestream

HEAVY = ("aiobotocore", "aiohttp", "botocore", "s3fs", "obstore", "gcsfs", "adlfs")
imported = []


class Finder:
    def find_spec(self, name, path=None, target=None):
        frame, searched = sys._getframe(), False
        while frame is not None:
            searched |= "importlib.util" in frame.f_code.co_filename.replace("/", ".")
            frame = frame.f_back
        if not searched:  # whether a package is there
            imported.append((name, threading.current_thread() is threading.main_thread()))


def heavy():
    return [name for name in HEAVY if name in sys.modules]


async def main(url, options):
    found = {"after_import": heavy()}
    full = []
    gc.callbacks.append(lambda phase, info: phase == "start" and info["generation"] == 2 and full.append(1))
    gc.collect()
    full.clear()
    sidestream.save
    young = len(gc.get_objects(0)) + len(gc.get_objects(1))
    found |= {"full": len(full), "young": young, "thresholds": gc.get_threshold(), "after_name": heavy()}
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


def ran(url: str, options: Any = None, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PROGRAM, url, json.dumps(options), *more]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_names_of_the_package_bring_no_client_and_no_full_collection(tmp_path: Path) -> None:
    found = ran(str(tmp_path))
    assert found["after_import"] == found["after_name"] == found["after_save"] == []
    assert found["full"] == 0
    assert found["young"] < 2000  # of some 20,000 objects: no save waits for a collection of them
    assert found["thresholds"] == [700, 10, 10]


def test_the_first_local_save_imports_nothing(tmp_path: Path) -> None:
    assert ran(str(tmp_path))["imported"] == []


def test_clients_of_an_object_store_are_imported_in_other_threads(s3: S3Server) -> None:
    found = ran(f"s3://{s3.bucket}/run", s3.options)
    assert found["after_name"] == []
    assert {"obstore", "s3fs", "aiobotocore"} <= set(found["after_save"])
    assert [name for name, on_the_loop in found["imported"] if on_the_loop] == []


def test_prewarm_imports_and_connects_what_the_first_save_uses(s3: S3Server) -> None:
    found = ran(f"s3://{s3.bucket}/run", s3.options, "prewarm")
    assert {"obstore", "s3fs", "aiobotocore"} <= set(found["prewarmed"])
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
    with importing():
        with pytest.raises(ImportError), importing():
            raise ImportError
        assert gc.get_threshold()[0] == 0
        assert gc.isenabled()
    assert gc.get_threshold() == thresholds


def test_thresholds_that_the_program_sets_meanwhile_are_kept(thresholds: tuple[int, int, int]) -> None:
    with importing():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_a_program_without_automatic_collection_has_none_afterwards(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(0, 10, 10)
    with importing():
        pass
    assert gc.get_threshold() == (0, 10, 10)
