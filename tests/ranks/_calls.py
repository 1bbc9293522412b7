"""Programs that each rank of a group runs in a test: objects whose methods are collectives, and ranks that never make a
call."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _cases import TIMEOUT_S, run
from keywords import for_load, for_run, for_save

import sidestream
import sidestream.blocking
from sidestream import events
from sidestream._group import rank_group as group
from sidestream.dcp import StorageReader

NAMES = ["10", "2", "b", "a", "c"]


class Collective:
    """Both of its methods are a collective that names it, and tell ``log`` when they have ended. ``inner``: an object
    in what it answers."""

    def __init__(self, name: str, log: list[str], inner: Any = None) -> None:
        self.name = name
        self.log = log
        self.inner = inner
        self.loaded: Any = None

    def _meet(self, method: str) -> None:
        """Check that every rank is here with the object of this name; otherwise raise on all ranks."""
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, [self.name, method])
        assert said == [[self.name, method]] * len(said), said
        self.log.append(f"{self.name}.{method}")

    def state_dict(self) -> dict[str, Any]:
        self._meet("state_dict")
        return {"name": self.name, "value": torch.ones(3), **({"inner": self.inner} if self.inner else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._meet("load_state_dict")
        self.loaded = state_dict["name"]


def objects(rank: int, log: list[str]) -> tuple[dict[str, Any], list[Collective]]:
    """Rank by rank in another order, nested in dicts and lists, in each other, and with a name that one rank has alone
    (a plain value: a collective needs every rank)."""
    made = [Collective(name, log, Collective(f"{name}-inner", log)) for name in NAMES]
    entries: list[tuple[str, Any]] = [(one.name, one) for one in made[:3]]
    deep = [made[4], {"x": made[3]}]
    entries += [("list", deep), ("nested", {"n": Collective("n", log), "m": Collective("m", log)}), (f"only{rank}", 1)]
    turned = entries[rank:] + entries[:rank]
    if rank % 2:
        turned.reverse()
        turned = [(key, dict(reversed(item.items())) if key == "nested" else item) for key, item in turned]
    return dict(turned), made


def ordered(rank: int, world: int, directory: Path, way: str) -> list[list[str]]:
    """Save and load, in one of the ways that lead to the objects. Returns what was called, and in which order."""
    saving: list[str] = []
    loading: list[str] = []
    state, _ = objects(rank, saving)
    target, made = objects(rank, loading)
    url = directory / "saved"
    limit: dict[str, Any] = {"timeout_s": TIMEOUT_S}

    async def saved_and_loaded(save_options: dict[str, Any], load_options: dict[str, Any]) -> None:
        await sidestream.save(state, url, **for_save(**limit, **save_options))
        dist.barrier()
        saving.append("|")
        await sidestream.load(target, url, **for_load(**limit, **load_options))

    async def restored() -> None:
        async with sidestream.Checkpointer(url, **for_run(**limit)) as checkpoints:
            await checkpoints.save(state, step=3)
            assert await checkpoints.restore(target) == 3

    def blocking() -> None:
        sidestream.blocking.async_save(state, url, **for_save(**limit)).result()
        sidestream.blocking.load(target, url, **for_load(**limit))

    def in_dcp() -> None:
        run(sidestream.save(state, url, **for_save(**limit)))
        # DCP asks objects in the order of a dict on each rank when it saves, so only its load is called here.
        for one in made:
            one.inner = None
        plain = {key: item for key, item in target.items() if isinstance(item, Collective)}
        dcp.load(plain, storage_reader=StorageReader(url))

    ways: dict[str, Callable[[], object]] = {
        "native": lambda: run(saved_and_loaded({}, {})),
        "atomic": lambda: run(saved_and_loaded({"streaming": True}, {"atomic": True})),
        "restore": lambda: run(restored()),
        "blocking": blocking,
        "dcp": in_dcp,
    }

    ways[way]()
    assert [one.loaded for one in made if one.name in ("10", "2", "b")] == ["10", "2", "b"]
    return [saving, loading]


def by_parts(rank: int, world: int, directory: Path) -> list[list[str]]:
    """Ranks that save apart, objects that are not all on every rank: a rank skips those that it lacks."""
    log: list[str] = []

    class Alone(Collective):
        def _meet(self, method: str) -> None:
            log.append(f"{self.name}.{method}")

    names = [name for number, name in enumerate(NAMES) if number % world != rank or name == "b"]
    state = {name: Alone(name, log) for name in (names if rank else reversed(names))}

    async def work() -> None:
        await sidestream.save(state, directory / "saved", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        log.append("|")
        await sidestream.load(state, directory / "saved", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S))

    run(work())
    return [log]


# --- ranks that wait -----------------------------------------------------------------------------------------------


class _Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self.come = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.come.set()


def heard() -> _Heard:
    handler = _Heard()
    logging.getLogger("sidestream").addHandler(handler)
    return handler


def stuck(rank: int, world: int, directory: Path, method: str, who: int) -> dict[str, Any]:
    """On one rank a method of an object does not return until the other ranks have raised."""
    group._STOP_S = 1.0  # this rank does not stop when the others do, and they wait for it for so long
    handler = heard()
    desk = directory / "others"
    desk.mkdir(exist_ok=True)

    class Stuck:
        calls = 0

        def state_dict(self) -> dict[str, Any]:
            self._stick("state_dict")
            return {"value": torch.ones(3)}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self._stick("load_state_dict")

        def _stick(self, here: str) -> None:
            if rank == who and here == method:
                deadline = time.monotonic() + TIMEOUT_S
                while len(list(desk.iterdir())) < world - 1 and time.monotonic() < deadline:
                    time.sleep(0.02)

    async def load() -> list[Any]:
        target = {"m": {"thing": Stuck()}}
        try:
            await sidestream.load(target, directory / "saved", options=sidestream.LoadOptions(timeout_s=15.0))
        except sidestream.errors.RankFailuresError as failures:
            return [[one.rank, one.step, one.kind] for one in failures.failures]
        finally:
            (desk / str(rank)).touch() if rank != who else None
        return []

    if rank == 0:
        run(sidestream.save({"m": {"thing": {"value": torch.ones(3)}}}, directory / "saved", process_group="alone"))
    dist.barrier()
    failures = run(load())
    return {"failures": failures, "said": handler.said}


def never_comes(
    rank: int, world: int, directory: Path, verb: str, who: list[int], before: bool, rank_wait_s: float
) -> dict[str, Any]:
    """The ranks in ``who`` do not make a call that the others make. ``before``: all have made one before."""
    handler = heard()
    told: dict[str, Any] = {}
    seen: list[Any] = []
    state = {"t": torch.ones(3)}
    limit: dict[str, Any] = {"rank_wait_s": rank_wait_s, "timeout_s": TIMEOUT_S}
    if rank == 0:
        run(sidestream.save(state, directory / "saved", process_group="alone"))
        run(_one_step(state, directory / "run"))
    dist.barrier()

    async def call() -> None:
        if verb == "save":
            await sidestream.save(state, directory / "failing", **for_save(**limit))
        elif verb == "load":
            await sidestream.load(state, directory / "saved", **for_load(**limit))
        else:
            async with sidestream.Checkpointer(directory / "run", **for_run(**limit)) as checkpoints:
                if verb == "restore":
                    await checkpoints.restore(state)
                else:
                    await checkpoints.save(state, step=2)

    async def work() -> None:
        if before:
            await sidestream.save(state, directory / "before", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        if rank in who:
            return
        try:
            await call()
        except sidestream.errors.RankFailuresError as failures:
            told["failures"] = [[one.rank, one.step, one.kind, one.text] for one in failures.failures]

    with events.observe(lambda event: seen.append(event) if isinstance(event, events.RanksMissing) else None):
        run(work())
    (directory / f"done{rank}").touch()
    while len(list(directory.glob("done*"))) < world:  # a rank that ends is a rank that has died
        time.sleep(0.02)
    told["said"] = handler.said
    told["events"] = [[one.operation, one.rank, list(one.missing)] for one in seen]
    return told


async def _one_step(state: dict[str, Any], run_at: Path) -> None:
    async with sidestream.Checkpointer(run_at, process_group="alone") as checkpoints:
        await checkpoints.save(state, step=1)


def comes_late(rank: int, world: int, directory: Path) -> dict[str, Any]:
    """Rank 1 makes its call when rank 0 has warned of it."""
    handler = heard()

    async def work() -> str:
        if rank == 1:
            while not (directory / "warned").exists():
                await asyncio.sleep(0.02)
        saving = asyncio.ensure_future(
            sidestream.save({"t": torch.ones(3)}, directory / "a", options=sidestream.SaveOptions(timeout_s=TIMEOUT_S))
        )
        if rank == 0:
            assert await asyncio.to_thread(handler.come.wait, TIMEOUT_S)
            (directory / "warned").touch()
        return (await saving).save_id

    return {"save_id": run(work()), "said": handler.said}


def load_events(rank: int, world: int, directory: Path) -> list[Any]:
    """The events of a restore, and of a load that does not fit on rank 1."""
    seen: list[events.LoadEvent] = []

    async def work() -> None:
        async with sidestream.Checkpointer(directory / "run", **for_run(timeout_s=TIMEOUT_S)) as checkpoints:
            await checkpoints.save({f"t{rank}": torch.ones(3)}, step=4)
            await checkpoints.restore({f"t{rank}": torch.zeros(3)})
        other = {f"t{rank}": torch.zeros(3 + rank)}
        try:
            await sidestream.load(
                other, directory / "run" / "step-4", options=sidestream.LoadOptions(timeout_s=TIMEOUT_S)
            )
        except sidestream.errors.RankFailuresError:
            return
        raise AssertionError("the load of another shape")

    with events.observe(lambda event: seen.append(event) if isinstance(event, events.LoadEvent) else None):
        run(work())
    assert {(one.load.rank, one.load.world) for one in seen} == {(rank, world)}
    last = seen[-1]
    assert isinstance(last, events.LoadFailed)
    return [
        [[one.load.operation, one.load.step, type(one).__name__] for one in seen],
        [last.error_type, last.written],
    ]
