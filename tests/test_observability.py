"""The observers of ``sidestream.observability``, with the real packages that they are for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import StatusCode
from phases import ALL_KINDS, watched
from prometheus_client import CollectorRegistry, Counter

import sidestream
from sidestream import events
from sidestream._runtime.torch_probes import dcp_logger
from sidestream.errors import MissingExtraError, UnsafeObjectError
from sidestream.events import CallerWaited, SaveCommitted, SaveContext
from sidestream.observability import CostReport, Costs, DCPLog, EventObserver, Journal, OpenTelemetry, Prometheus
from sidestream.observability.measures import BOUNDARIES, MEASURES

NEVER_LABELS = {"url", "run", "step", "save_id", "rank", "fqn", "tensor", "generation"}


def state() -> dict[str, Any]:
    return {f"w{number}": torch.full((1000,), float(number)) for number in range(4)}


async def use(run: Path) -> None:
    """Two saves, one of which fails, a restore, and a pass of pruning."""
    async with sidestream.Checkpointer(run, keep=sidestream.KeepLast(1)) as checkpoints:
        await checkpoints.save(state(), step=1)
        await checkpoints.save(state(), step=2)
        with pytest.raises(UnsafeObjectError):
            await checkpoints.save({"bad": object()}, step=3)
        await checkpoints.restore(state())


# --- Prometheus -------------------------------------------------------------------------------------------------------


async def test_prometheus_counts(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with Prometheus(registry, {"job": "a"}), watched(SaveCommitted) as committed:
        await use(tmp_path)

        def value(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"sidestream_{name}", {"job": "a", **labels})

        assert value("saves_total", operation="save", outcome="committed", error_type="") == 2
        assert value("saves_total", operation="save", outcome="failed", error_type="UnsafeObjectError") == 1
        assert value("save_bytes_total", storage="file") == sum(event.nbytes for event in committed)
        for phase, count in (("plan", 3), ("stage", 2), ("write", 2), ("commit", 2), ("total", 2)):
            assert value("save_duration_seconds_count", operation="save", phase=phase) == count, phase
        assert value("saves_in_flight", state="staging") == 0
        assert value("saves_in_flight", state="writing") == 0
        assert value("last_durable_step") == 2
        assert value("last_durable_timestamp_seconds") == committed[-1].time_ns / 1e9
        assert value("loads_total", operation="restore", outcome="applied", error_type="") == 1
        assert value("retention_deleted_total") == 1
    assert list(registry.collect()) == []


async def test_the_labels_do_not_grow_with_the_run(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    with Prometheus(registry):

        def series() -> set[tuple[str, frozenset[tuple[str, str]]]]:
            samples = [sample for family in registry.collect() for sample in family.samples]
            return {(sample.name, frozenset(sample.labels.items())) for sample in samples}

        await use(tmp_path / "one")
        before = {one for one in series() if "blocked" not in one[0]}  # whether a call is short enough differs
        for number in range(3):
            await use(tmp_path / f"run-{number}")
        after = {one for one in series() if "blocked" not in one[0]}
    assert after == before
    assert not {label for one in MEASURES for label in one.labels} & NEVER_LABELS
    assert not [one for one in after for _, text in one[1] if str(tmp_path) in text]


def test_prometheus_can_be_made_again_and_not_twice() -> None:
    registry = CollectorRegistry()
    first = Prometheus(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Prometheus(registry)
    assert len(list(registry.collect())) == len(MEASURES)
    first.close()
    first.close()
    Prometheus(registry).close()


def test_prometheus_that_cannot_be_made_leaves_no_collectors() -> None:
    registry = CollectorRegistry()
    theirs = Counter("sidestream_loads", "Of the user", registry=registry)
    with pytest.raises(ValueError, match="sidestream_loads"):
        Prometheus(registry)
    assert len(list(registry.collect())) == 1
    registry.unregister(theirs)
    Prometheus(registry).close()


# --- OpenTelemetry ----------------------------------------------------------------------------------------------------


class Exported:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.meters = MeterProvider([self.reader])

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def metrics(self) -> dict[str, Any]:
        content = json.loads(self.reader.get_metrics_data().to_json())  # type: ignore[union-attr]
        found = content["resource_metrics"][0]["scope_metrics"][0]["metrics"]
        return {one["name"]: one for one in found}


@pytest.mark.parametrize("how", ["async_save", "run", "full run"])
async def test_the_span_of_a_save_is_linked_to_the_span_of_the_call(how: str, tmp_path: Path) -> None:
    exported = Exported()
    tracer = exported.provider.get_tracer("test")
    with OpenTelemetry(exported.provider, exported.meters), watched(events.SaveEvent) as seen:
        async with sidestream.Checkpointer(tmp_path / "run", slots=1) as checkpoints:
            if how == "full run":
                before = checkpoints.async_save(state(), step=1)
            with tracer.start_as_current_span("training step") as span:
                if how == "async_save":
                    pending = sidestream.async_save(state(), tmp_path / "a")
                else:
                    pending = checkpoints.async_save(state(), step=2)
            info = await pending
            if how == "full run":
                await before
    (found,) = [one for one in exported.spans("sidestream.save") if one.attributes["sidestream.url"] == info.url]  # type: ignore[index]
    assert found.parent is None
    assert [link.context.span_id for link in found.links] == [span.get_span_context().span_id]
    mine = [event for event in seen if event.save.url == info.url]
    assert (found.start_time, found.end_time) == (mine[0].time_ns, mine[-1].time_ns)
    assert found.attributes is not None
    assert found.attributes["sidestream.save_id"] == info.save_id
    assert found.attributes["sidestream.outcome"] == "committed"
    children = [one for one in exported.exporter.get_finished_spans() if one.parent and found.context and
                one.parent.span_id == found.context.span_id]  # fmt: skip
    assert sorted(one.name for one in children) == [
        f"sidestream.{name}" for name in ("commit", "plan", "stage", "write")
    ]
    assert {one.end_time for one in children} == {event.time_ns for event in mine[1:]}


async def test_a_failed_save_and_a_restore_are_spans(tmp_path: Path) -> None:
    exported = Exported()
    with OpenTelemetry(exported.provider, exported.meters):
        await use(tmp_path)
    outcomes = [span.attributes["sidestream.outcome"] for span in exported.spans("sidestream.save")]  # type: ignore[index]
    assert sorted(map(str, outcomes)) == ["committed", "committed", "failed"]
    (failed,) = [span for span in exported.spans("sidestream.save") if span.status.status_code is StatusCode.ERROR]
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "UnsafeObjectError"
    restores = [
        span
        for span in exported.spans("sidestream.load")
        if (span.attributes or {})["sidestream.operation"] == "restore"
    ]
    assert len(restores) == 1
    metrics = exported.metrics()
    points = metrics["sidestream.saves"]["data"]["data_points"]
    assert {(one["attributes"]["sidestream.outcome"], one["value"]) for one in points} == {
        ("committed", 2),
        ("failed", 1),
    }
    assert {one["attributes"].get("error.type") for one in points} == {None, "UnsafeObjectError"}
    assert metrics["sidestream.save.duration"]["unit"] == "s"
    durations = metrics["sidestream.save.duration"]["data"]["data_points"]
    assert all(tuple(one["explicit_bounds"]) == BOUNDARIES for one in durations)
    assert metrics["sidestream.checkpoint.last_durable.step"]["data"]["data_points"][0]["value"] == 2


# --- Costs ------------------------------------------------------------------------------------------------------------


def waited(began_s: float, ended_s: float, cause: events.WaitCause = "staged", **reasons: float) -> CallerWaited:
    return CallerWaited(cause, ended_s - began_s, reasons, None, time_ns=int(ended_s * 1e9))  # type: ignore[arg-type]


def test_each_second_counts_once() -> None:
    with Costs() as costs:
        for event in (
            waited(1, 2, copies=1.0),
            waited(1.5, 3, "fence", memory=1.5),
            waited(0, 3.5, "call", slot=3.5),
            waited(10, 11, "call"),
            waited(10.2, 10.4, "fence", copies=0.2),
        ):
            events.emit(event)
    report = costs.report()
    assert dict(report.seconds) == pytest.approx({"staged": 1.0, "fence": 1.0, "call": 1.5 + 1.0})
    assert dict(report.waited_for) == pytest.approx({"copies": 1.0, "memory": 1.0, "slot": 1.5, "ranks": 0.0})


async def test_costs_of_a_run(tmp_path: Path) -> None:
    with Costs() as costs, watched(SaveCommitted) as committed:
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            for _ in range(20):
                with costs.step():
                    pass
            assert "dilation" not in costs.report().seconds
            for step in range(20):
                with costs.step():
                    await checkpoints.save(state(), step=step)
    report = costs.report()
    assert (report.steps_beside, report.steps_without) == (20, 20)
    assert report.seconds["dilation"] > 0  # the steps that save are longer than those that do nothing
    assert (report.saves, report.failed, report.last_step) == (20, 0, 19)
    assert report.nbytes == sum(event.nbytes for event in committed)
    assert report.last_durable_age_s is not None
    numbers = report.as_dict()
    assert all(type(value) in (int, float) for value in numbers.values())
    assert numbers["dilation_share"] == report.seconds["dilation"] / report.run_s
    assert "dilation" in str(report)
    assert "<th>cause</th>" in report._repr_html_()
    assert len(repr(report).splitlines()) == 1


def dilated(monkeypatch: pytest.MonkeyPatch, waits: Callable[[int], events.Event | None]) -> CostReport:
    """The report of 20 steps of 1 s, and of 20 beside a save, each 0.5 s longer, in which ``waits`` end."""
    now = 0.0
    monkeypatch.setattr(
        "sidestream.observability.costs.time", SimpleNamespace(monotonic=lambda: now, time_ns=lambda: 0)
    )
    with Costs() as costs:
        for _ in range(20):
            with costs.step():
                now += 1.0
        events.emit(events.SaveStarted(SaveContext("save", "a")))
        for number in range(20):
            assert "dilation" not in costs.report().seconds
            with costs.step():
                now += 1.5
                if (event := waits(number)) is not None:
                    events.emit(event)
        return costs.report()


def test_dilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller waits in half of what each step is longer."""
    report = dilated(monkeypatch, lambda number: waited(number, number + 0.25))
    assert dict(report.seconds) == pytest.approx({"call": 0, "staged": 5.0, "fence": 0, "dilation": 5.0})
    assert report.run_s == 50


def test_a_wait_of_another_task_makes_no_step_shorter_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last step a wait ends that began long before it."""
    report = dilated(monkeypatch, lambda number: waited(0, 20) if number == 19 else None)
    assert report.seconds["dilation"] == pytest.approx(19 * 1.5 - 20)


def test_a_report_of_nothing() -> None:
    with Costs() as costs:
        report = costs.report()
    assert isinstance(report, CostReport)
    assert report.lost_s == 0
    assert "last_step" not in report.as_dict()
    assert str(report)


# --- DCP's logger -----------------------------------------------------------------------------------------------------


async def test_handlers_of_dcp_get_the_events(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append({"level": record.levelname, **record.msg})  # type: ignore[dict-item]

    logger, handler = dcp_logger(), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with DCPLog():
            await use(tmp_path)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    mine = [one for one in found if one.get("func_name") == "save"]
    assert [one["event"] for one in mine if one["event"] in ("start", "end", "exception")] == [
        "start", "end", "start", "end", "start", "exception",
    ]  # fmt: skip
    assert [one["level"] for one in mine if one["event"] == "exception"] == ["ERROR"]
    ended = next(one for one in mine if one["event"] == "end")
    assert ended["checkpoint_id"] == str(tmp_path / "step-1")
    assert ended["times_spent"] > 0


async def test_exporters_and_handlers_that_hang_hold_up_no_save(tmp_path: Path) -> None:
    goes_on, exported, handled = threading.Event(), Exported(), []

    class Exporter(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            goes_on.wait(60)
            return exported.exporter.export(spans)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            goes_on.wait(60)
            handled.append(record)

    exported.provider.add_span_processor(SimpleSpanProcessor(Exporter()))
    handler = Handler()
    dcp_logger().addHandler(handler)
    try:
        with OpenTelemetry(exported.provider, exported.meters), DCPLog(), watched(SaveCommitted) as committed:
            await sidestream.save(state(), tmp_path / "a")
            assert len(committed) == 1
            assert not handled
            goes_on.set()
    finally:
        dcp_logger().removeHandler(handler)
    assert len(handled) >= 5
    assert len(exported.spans("sidestream.save")) == 2  # of each exporter


def test_the_loop_calls_these_observers_itself(tmp_path: Path) -> None:
    observers = everyone(tmp_path)
    assert not events.may_wait()
    with events.observe(print):
        assert events.may_wait()
    for one in observers:
        one.close()
        one.close()


def test_spans_that_are_open_end_with_the_observer() -> None:
    exported = Exported()
    with OpenTelemetry(exported.provider, exported.meters):
        events.emit(events.SaveStarted(SaveContext("save", "a")))
        events.emit(events.SavePlanned(SaveContext("save", "a")))
    assert [len(exported.spans(f"sidestream.{name}")) for name in ("save", "plan")] == [1, 1]


def test_what_fails_at_the_end_is_logged_and_not_raised(caplog: pytest.LogCaptureFixture) -> None:
    class Refuses(Sampler):
        def should_sample(self, *_: object, **__: object) -> Any:
            raise ValueError("no span")

        def get_description(self) -> str:
            return "refuses"

    with OpenTelemetry(TracerProvider(sampler=Refuses())) as observer:
        events.emit(events.SaveStarted(SaveContext("save", "a")))
    assert observer.lost == 1
    assert len([record for record in caplog.records if "loses events: no span" in record.getMessage()]) == 1


@pytest.mark.parametrize("ended", ["one", "two"])
def test_two_saves_of_one_url_are_told_apart_by_their_ids(ended: str) -> None:
    registry = CollectorRegistry()
    with Prometheus(registry):
        for number, save_id in ((1, "one"), (2, "two")):
            events.emit(events.SaveStarted(SaveContext("save", "a"), monotonic_ns=number * 10**9))
            events.emit(events.SavePlanned(SaveContext("save", "a", save_id), monotonic_ns=10 * 10**9))
        events.emit(SaveCommitted(SaveContext("save", "a", ended), 1, {}, monotonic_ns=20 * 10**9))
        labels = {"operation": "save", "phase": "total"}
        total = registry.get_sample_value("sidestream_save_duration_seconds_sum", labels)
    assert total == {"one": 19, "two": 18}[ended]


def test_every_kind_of_event_is_measured() -> None:
    registry = CollectorRegistry()
    with Prometheus(registry):
        for event in ALL_KINDS:
            events.emit(event)
        events.emit(events.LoadStarted(events.LoadContext("load", "gs://a")))
        events.emit(events.LoadRead(events.LoadContext("load", "gs://a"), 7))
        events.emit(events.LoadApplied(events.LoadContext("load", "gs://a"), 7, {}))
        events.emit(SaveCommitted(SaveContext("copy", "b", step=9), 1, {}))
        events.emit(events.SaveSkipped(SaveContext("save", "b"), "no slot"))
        for save, event_of in (("one", events.SaveStarted), ("two", events.SaveStarted), ("two", events.SaveStaged)):
            events.emit(event_of(SaveContext("save", "c", save)))
        two = SaveContext("save", "c", "two")
        events.emit(events.SaveFailed(two, "write", "CancelledError", "", "absent"))
        wanted = {
            ("storage_retries_total", ("storage", "s3")): 1,
            ("storage_throttled_seconds_total", ("storage", "s3")): 0.5,
            ("guarantees_lost_total",): 1, ("writer_processes_lost_total",): 1,
            ("save_blocked_seconds_sum", ("cause", "fence")): 0.5,
            ("save_blocked_reason_seconds_total", ("cause", "fence"), ("reason", "copies")): 0.4,
            ("retention_deleted_total",): 1, ("checkpoints_damaged",): 2, ("load_fallbacks_total",): 1,
            ("load_bytes_total", ("storage", "gs")): 7, ("last_durable_step",): 0,
            ("saves_in_flight", ("state", "staging")): 1, ("saves_in_flight", ("state", "writing")): 0,
            ("saves_total", ("operation", "save"), ("outcome", "skipped"), ("error_type", "")): 1,
            ("saves_total", ("operation", "save"), ("outcome", "cancelled"), ("error_type", "CancelledError")): 1,
        }  # fmt: skip
        for (name, *labels), value in wanted.items():
            assert registry.get_sample_value(f"sidestream_{name}", dict(labels)) == value, name


# --- all of them ------------------------------------------------------------------------------------------------------


def everyone(tmp_path: Path) -> list[EventObserver]:
    exported = Exported()
    return [
        Prometheus(CollectorRegistry()), OpenTelemetry(exported.provider, exported.meters),
        Journal(tmp_path / "journal.jsonl"), DCPLog(), Costs(),
    ]  # fmt: skip


async def saved_bytes(target: Path) -> bytes:
    await sidestream.save(state(), target)
    await sidestream.load(state(), target)
    return b"".join(path.read_bytes() for path in sorted(target.glob("*.distcp")))


@pytest.mark.parametrize("at", [events.SaveStarted, events.SavePlanned, events.SaveWritten])
async def test_observers_that_close_in_the_middle_of_a_save(at: type, tmp_path: Path) -> None:
    wanted = await saved_bytes(tmp_path / "without")
    observers = everyone(tmp_path)

    def close(event: events.Event) -> None:
        if isinstance(event, at):
            for one in observers:
                one.close()

    with events.observe(close):
        assert await saved_bytes(tmp_path / "with") == wanted


async def test_an_observer_that_raises_changes_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EventObserver):
        def _observe(self, event: events.Event) -> None:
            raise ValueError("the observer is broken")

    wanted = await saved_bytes(tmp_path / "without")
    with Broken(), watched(SaveCommitted) as committed:
        assert await saved_bytes(tmp_path / "with") == wanted
    assert len(committed) == 1
    assert "an observer failed on SaveCommitted" in caplog.text


async def test_several_threads_emit_at_once(tmp_path: Path) -> None:
    observers = everyone(tmp_path)
    costs, registry = observers[-1], observers[0]._registry  # type: ignore[attr-defined]

    def emit(number: int) -> None:
        for step in range(200):
            save = SaveContext("save", f"run-{number}/{step}", step=step, rank=number)
            for event in (events.SaveStarted(save), events.SaveWritten(save, 1), SaveCommitted(save, 1, {})):
                events.emit(event)

    threads = [threading.Thread(target=emit, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    labels = {"operation": "save", "outcome": "committed", "error_type": ""}
    assert registry.get_sample_value("sidestream_saves_total", labels) == 800
    assert registry.get_sample_value("sidestream_saves_in_flight", {"state": "staging"}) == 0
    assert isinstance(costs, Costs)
    assert costs.report().saves == 800
    for observer in observers:
        observer.close()
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) == 1 + 3 * 800


@pytest.mark.parametrize(
    ("make", "package", "extra"),
    [(Prometheus, "prometheus_client", "prometheus"), (OpenTelemetry, "opentelemetry", "otel")],
)
def test_a_package_that_is_missing(
    make: Callable[[], EventObserver], package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"sidestream\[{extra}\]") as caught:
        make()
    assert caught.value.extra == extra


def test_the_package_imports_none_of_it() -> None:
    code = (
        "import sys, sidestream\n"
        "assert not [one for one in sys.modules if one.startswith('sidestream.observability')]\n"
        "sidestream.observability.Costs().close()\n"
        "assert not [one for one in sys.modules if one.split('.')[0] in ('prometheus_client', 'opentelemetry')]\n"
        "assert 'torch.distributed.checkpoint.logger' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ, check=True, timeout=120)


def test_warnings_are_sentences(caplog: pytest.LogCaptureFixture) -> None:
    lost = "the writer process was killed by signal 9"
    for event in (
        events.GuaranteeLost("dir://a", "it has no conditional put"),
        events.WriterProcessLost("a", 7, lost, again=True),
        events.WriterProcessLost("a", 8, lost, again=False),
        events.VersionPassedOver("run", "step-2", "CorruptCheckpointError", "w: altered"),
    ):
        events.emit(event)
    assert [(one.levelname, one.getMessage()) for one in caplog.records if one.name == "sidestream"] == [
        ("WARNING", "dir://a: it has no conditional put"),
        ("WARNING", f"a: {lost} (PID 7); a new one writes the files again"),
        ("WARNING", f"a: {lost} (PID 8)"),
        ("WARNING", "run: step-2 is not served: CorruptCheckpointError: w: altered"),
    ]
