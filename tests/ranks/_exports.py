"""Exports by ranks, as each rank of a group runs them in a test."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import torch
from _cases import TIMEOUT_S, die, placed, run
from keywords import for_run, for_save
from late_export import Late
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import sidestream
from sidestream import events
from sidestream._convert.source import Source

FILE_BYTES = 1 << 20


def state_of(world: int, plus: int = 0) -> dict[str, Any]:
    """Sharded and replicated tensors, two of them tied, for files of several sizes."""
    mesh = init_device_mesh("cpu", (world,))
    rows = placed(torch.arange(1 << 20).reshape(1024, -1) + plus, mesh, Shard(0))
    columns = placed(torch.arange(300_000.0).reshape(600, 500) + plus, mesh, Shard(1))
    replicas = {str(n): torch.full((100_003 + n,), float(n + plus)) for n in range(5)}
    return {"model": {"rows": rows, "columns": columns, "tied": columns, **replicas}, "step": plus}


def export_to(url: object, rank: int, **options: Any) -> sidestream.HF:
    files = {"config.json": b"{}"} if rank == 0 else {"config.json": Path("/nowhere/config.json")}
    names = sidestream.strip_prefix("model.")
    return sidestream.HF(str(url), select="model.*", names=names, max_shard_bytes=FILE_BYTES, files=files, **options)


def told_of(outcome: Any) -> Any:
    """What an export has come to: its report, or who failed, or another error."""
    if isinstance(outcome, sidestream.errors.RankFailuresError):
        return [[one.rank, one.kind] for one in outcome.failures]
    if isinstance(outcome, BaseException):
        return type(outcome).__name__
    return [outcome.url, outcome.files, outcome.nbytes, outcome.tensors, outcome.cast, outcome.left_out]


def exports(rank: int, world: int, directory: Path, url: str | None = None, **where: Any) -> list[Any]:
    """Beside a save and in a run, where a step is saved again. Returns the reports, and what this rank wrote."""
    base, wrote = url or str(directory), []

    def seen(event: object) -> None:
        if isinstance(event, events.SaveWritten) and event.save.operation == "export":
            wrote.append([event.save.rank, event.save.world, event.nbytes])

    async def save() -> list[Any]:
        export = export_to(f"{base}/hf", rank, dtype=torch.bfloat16, **where)
        info = await sidestream.save(
            state_of(world), f"{base}/step", export=export, **for_save(timeout_s=TIMEOUT_S, **where)
        )
        told = [told_of(one) for one in info.exports]
        export = export_to(f"{base}/exports/{{step}}", rank, **where)
        async with sidestream.Checkpointer(
            f"{base}/run", export=export, **for_run(timeout_s=TIMEOUT_S, **where)
        ) as checkpoints:
            for plus in (6, 7):
                pending = checkpoints.async_save(state_of(world, plus), step=6)
                await pending
                told.append(told_of(await pending.exports[0]))
        return told

    with events.observe(seen):
        return [run(save()), wrote]


def failing_export(rank: int, world: int, directory: Path, how: str, who: int) -> Any:
    """One rank fails in an export; the checkpoint is there all the same, and the next export succeeds."""

    begun: list[Any] = []
    loop: Any = None

    def seen(event: object) -> None:
        if isinstance(event, events.SaveEvent) and event.save.operation == "export" and rank == who:
            if how == "cancelled late" and isinstance(event, events.SaveWritten) and begun:
                begun.pop().exports[0].cancel()
            if how == "dies" and isinstance(event, events.SavePlanned):
                die()
            if how == "dies written" and isinstance(event, events.SaveWritten):
                die()

    def renamed(name: str) -> str:
        return "same" if how == "collides" and rank == who else name

    def cancelling(source: Source) -> Any:
        """Cancel the export while a thread lists the checkpoint, and go on when its task has seen that."""
        cancelled = threading.Event()

        def cancel() -> None:
            begun.pop().exports[0].cancel()
            loop.call_soon(loop.call_soon, cancelled.set)

        if begun:
            loop.call_soon_threadsafe(cancel)
            assert cancelled.wait(TIMEOUT_S)
        return parts(source)

    parts = Source.parts
    if how == "cancelled while it chooses" and rank == who:
        Source.parts = cancelling  # type: ignore[method-assign]

    async def save() -> Any:
        nonlocal loop
        loop = asyncio.get_running_loop()
        options: dict[str, Any] = {"names": renamed} if how == "collides" else {}
        if how == "differs" and rank == who:
            options["select"] = "model.rows"
        if how == "differs in dtype":  # files of the same sizes
            options["dtype"] = torch.float16 if rank == who else torch.bfloat16
        export = sidestream.HF(directory / "hf", max_shard_bytes=FILE_BYTES, **options)
        pending = sidestream.async_save(
            state_of(world), directory / "step", export=export, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        )
        begun.append(pending)
        if how == "cancelled" and rank == who:
            pending.exports[0].cancel()
        if how == "cancelled before its first step" and rank == who:
            await asyncio.sleep(0)  # the export has begun
            pending.exports[0].cancel()
        info = await pending
        try:
            outcome: Any = await pending.exports[0]
        except BaseException as error:
            outcome = error
        if not how.startswith("dies"):
            again = sidestream.HF(directory / "again", max_shard_bytes=FILE_BYTES)
            await sidestream.save(
                state_of(world), directory / "more", export=again, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
            )
        return [pending.outcome, info.nbytes > 0, told_of(outcome)]

    with events.observe(seen):
        return run(save())


def exports_that_differ(rank: int, world: int, directory: Path) -> Any:
    """One rank exports and the other does not, and a save that fails has exports that end as well."""

    async def save() -> Any:
        told = []
        export = sidestream.HF(directory / "hf") if rank == 0 else None
        try:
            await sidestream.save(
                state_of(world), directory / "step", export=export, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
            )
        except sidestream.errors.RankFailuresError as failures:
            told.append([[one.rank, one.kind, "exports" in one.text] for one in failures.failures])
        (directory / "taken").mkdir(exist_ok=True)
        (directory / "taken" / "file").touch()
        export = sidestream.HF(directory / "hf")
        pending = sidestream.async_save(
            state_of(world), directory / "taken", export=export, options=sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        )
        for one in (pending, pending.exports[0]):
            try:
                await one
            except sidestream.errors.SidestreamError as error:
                told.append(type(error).__name__)
        return told

    return run(save())


def export_of_a_replaced_checkpoint(rank: int, world: int, directory: Path) -> Any:
    """Another save of the ranks replaces the checkpoint before rank 0 opens it."""

    async def save() -> Any:
        options = sidestream.SaveOptions(timeout_s=TIMEOUT_S)
        late: Any = Late(export_to(directory / "first", rank))
        last = directory / "last"
        first = sidestream.async_save(state_of(world, 1), last, export=late, overwrite=True, options=options)
        await first
        export = export_to(directory / "second", rank)
        second = await sidestream.save(state_of(world, 2), last, export=export, overwrite=True, options=options)
        late.begins.set()
        try:
            outcome: Any = await first.exports[0]
        except sidestream.errors.SidestreamError as error:
            outcome = error
        return [told_of(outcome), told_of(second.exports[0])[0]]

    return run(save())


def exports_of_a_run_that_prunes(rank: int, world: int, directory: Path) -> Any:
    """Retention keeps one step, and the export of the first one begins when the second one is committed."""

    async def save() -> Any:
        late: Any = Late(export_to(directory / "exports" / "{step}", rank))
        options = for_run(export=late, exports_every=2, keep=sidestream.KeepLast(1), timeout_s=TIMEOUT_S)
        async with sidestream.Checkpointer(directory / "run", **options) as checkpoints:
            first = checkpoints.async_save(state_of(world), step=2)
            await first
            await checkpoints.save(state_of(world), step=3)
            leased = (await checkpoints.prune()).leased
            late.begins.set()
            return [leased, told_of(await first.exports[0])[0]]

    return run(save())


def exports_that_overlap(rank: int, world: int, directory: Path) -> Any:
    """The exports of one rank overlap at one step. The save of that step fails on all ranks, the next one succeeds."""

    async def save() -> Any:
        other = "exports" if rank else "others"
        exports = [sidestream.HF(f"{directory}/{other}/2"), sidestream.HF(f"{directory}/exports/{{step}}")]
        options = for_run(export=exports, exports_every=2, timeout_s=TIMEOUT_S)
        async with sidestream.Checkpointer(directory / "run", **options) as checkpoints:
            try:
                await checkpoints.save(state_of(world), step=2)
            except sidestream.errors.RankFailuresError as failures:
                told = told_of(failures)
            await checkpoints.save(state_of(world), step=3)
            return [told, await checkpoints.steps()]

    return run(save())


def exports_on_storage(
    rank: int, world: int, directory: Path, url: str, options: dict[str, Any] | None, fails: int | None = None
) -> Any:
    """An export into a bucket, or (without options) where nothing can be renamed, of which one rank fails after all
    have begun to write."""
    where = {"storage": sidestream.Storage(options, commit="rename" if options else "marker")}
    begun: list[Any] = []

    def seen(event: object) -> None:
        if isinstance(event, events.SaveWritten) and event.save.operation == "export" and rank == fails:
            begun[0].exports[0].cancel()

    async def save() -> Any:
        name, target = ("hf", "step") if fails is None else ("failed", "step-2")
        export = export_to(f"{url}/{name}", rank, **where)
        pending = sidestream.async_save(
            state_of(world), f"{url}/{target}", export=export, **for_save(timeout_s=TIMEOUT_S, **where)
        )
        begun.append(pending)
        await pending
        try:
            report: Any = await pending.exports[0]
        except BaseException as error:
            return [told_of(error), pending.outcome]
        return [len(report.files) >= 4, pending.outcome]

    with events.observe(seen):
        return run(save())
