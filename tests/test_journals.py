"""Journals: what they keep, what becomes of events that a disk does not take, and the commands that read them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import trace_schema
from phases import ALL_KINDS, watched

import sidestream
from sidestream import events
from sidestream.events import SaveCommitted
from sidestream.observability import Costs, Journal
from sidestream.observability.records import JournalContent, read_journal
from sidestream.observability.trace import report_of, trace_of


def state() -> dict[str, Any]:
    return {f"w{number}": torch.full((1000,), float(number)) for number in range(4)}


async def use(run: Path) -> None:
    async with sidestream.Checkpointer(run, keep=sidestream.KeepLast(1), slots=2) as checkpoints:
        pending = [checkpoints.async_save(state(), step=step) for step in (1, 2, 3)]
        for one in pending:
            await one.staged
            await one
        await checkpoints.restore(state())


async def test_a_journal_has_every_event(tmp_path: Path) -> None:
    began = time.time_ns()
    with Journal(tmp_path / "j") as journal, watched(object) as seen:
        await use(tmp_path / "run")
        for event in ALL_KINDS:
            events.emit(event)
    content = read_journal(tmp_path / "j")
    times = [time_ns for time_ns, event in content.events if not hasattr(event, "time_ns")]
    assert all(began <= time_ns <= time.time_ns() for time_ns in times)
    assert len(times) == 6
    assert sorted(map(repr, (event for _, event in content.events))) == sorted(
        repr(event).replace("mappingproxy(", "").replace("})", "}") if "mappingproxy" in repr(event) else repr(event)
        for event in seen
    )
    assert (content.lost, content.unreadable, content.rank, journal.lost) == (0, 0, 0, 0)
    for line in (tmp_path / "j").read_text().splitlines():
        json.loads(line)


async def test_a_journal_is_continued_after_a_part_of_a_line(tmp_path: Path) -> None:
    with Journal(tmp_path / "j"):
        events.emit(ALL_KINDS[0])
    with (tmp_path / "j").open("a") as file:
        file.write('{"event": "Retr')
    with Journal(tmp_path / "j"):
        events.emit(ALL_KINDS[1])
    content = read_journal(tmp_path / "j")
    assert [event for _, event in content.events] == ALL_KINDS[:2]
    assert content.unreadable == 1


def run(code: str, *words: object) -> None:
    subprocess.run([sys.executable, "-c", code, *map(str, words)], env=os.environ, check=True, timeout=120)


def test_a_journal_that_is_not_closed_is_written_at_the_end_of_the_program(tmp_path: Path) -> None:
    run(
        "import sys\n"
        "from sidestream import events\n"
        "from sidestream.observability import Journal\n"
        "journal = Journal(sys.argv[1])\n"
        "for number in range(5000): events.emit(events.SlowPart('s3://a', 1.0, number))\n",
        tmp_path / "j",
    )
    assert [event.sent_bytes for _, event in read_journal(tmp_path / "j").events] == list(range(5000))  # type: ignore[union-attr]


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    run(
        "import os, sys\n"
        "from sidestream import events\n"
        "from sidestream.observability import Journal\n"
        "with Journal(sys.argv[1]) as journal:\n"
        "    if not (child := os.fork()):\n"
        "        events.emit(events.SlowPart('s3://a', 1.0, 2))\n"
        "        journal.close()\n"
        "        os._exit(journal._queue.qsize())\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "    events.emit(events.SlowPart('s3://a', 1.0, 1))\n",
        tmp_path / "j",
    )
    content = read_journal(tmp_path / "j")
    assert [event for _, event in content.events] == [events.SlowPart("s3://a", 1.0, 1)]
    assert content.unreadable == 0


def test_a_part_of_a_line_is_no_part_of_the_next_one(tmp_path: Path) -> None:
    """A limit of the size of the file ends a write in the middle, as a full disk does."""
    run(
        "import os, resource, signal, sys, time\n"
        "from sidestream import events\n"
        "from sidestream.observability import Journal\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60, hard))\n"
        "with Journal(sys.argv[1]) as journal:\n"
        "    events.emit(events.SlowPart('s3://a', 1.0, 1))\n"
        "    while not journal.lost: time.sleep(0.01)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))\n"
        "    for number in (2, 3): events.emit(events.SlowPart('s3://a', 1.0, number))\n",
        tmp_path / "j",
    )
    content = read_journal(tmp_path / "j")
    assert [event for _, event in content.events] == [events.SlowPart("s3://a", 1.0, number) for number in (2, 3)]
    assert (content.lost, content.unreadable) == (1, 1)


def test_an_event_that_cannot_be_written_ends_no_journal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(tmp_path / "j") as journal:
        events.emit(events.Retried("reading", "s3://a", 1, 0.5, object()))  # type: ignore[arg-type]
        events.emit(ALL_KINDS[0])
    assert journal.lost == 1
    assert "loses events" in caplog.text
    content = read_journal(tmp_path / "j")
    assert [event for _, event in content.events] == ALL_KINDS[:1]
    assert content.lost == 1


async def test_a_full_disk_loses_lines_and_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal("/dev/full") as journal, watched(SaveCommitted) as committed:
        await use(tmp_path / "run")
    assert len(committed) == 3
    assert journal.lost > 3
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [text for text in warnings if "/dev/full loses events" in text and "No space left" in text]
    assert len([text for text in warnings if "loses events" in text]) == 1


async def test_a_disk_that_hangs_holds_up_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe that nothing reads: when it is full, a write to it never returns."""
    monkeypatch.setattr("sidestream.observability.observer._MOST", 50)
    monkeypatch.setattr("sidestream.observability.observer._CLOSE_S", 0.1)
    os.mkfifo(tmp_path / "j")
    reader = os.open(tmp_path / "j", os.O_RDONLY | os.O_NONBLOCK)
    try:
        writer = os.open(tmp_path / "j", os.O_WRONLY | os.O_NONBLOCK)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.close(writer)
        journal = Journal(tmp_path / "j")
        for number in range(60):
            events.emit(events.Retried("reading", "s3://a", number, 0.5, "reset"))
        assert journal.lost == 10
        with watched(SaveCommitted) as committed:
            await use(tmp_path / "run")
        lost = journal.lost
        journal.close()
        assert len(committed) == 3
        assert journal.lost > lost
        lost = journal.lost
        journal.close()
        assert journal.lost == lost
        assert len([record for record in caplog.records if "loses events" in record.getMessage()]) == 1
    finally:
        os.close(reader)  # which ends the write


async def test_a_report_is_that_of_costs(tmp_path: Path) -> None:
    with Costs() as costs, Journal(tmp_path / "j"):
        await use(tmp_path / "run")
        report = costs.report()
    found = report_of(read_journal(tmp_path / "j"))
    assert dict(found.seconds) == pytest.approx(dict(report.seconds), abs=1e-6)
    assert dict(found.waited_for) == pytest.approx(dict(report.waited_for), abs=1e-6)
    for name in ("saves", "failed", "skipped", "nbytes", "saving_s", "last_step"):
        assert getattr(found, name) == getattr(report, name), name
    assert report_of(read_journal(os.devnull)).lost_s == 0


def test_a_journal_of_a_later_version(tmp_path: Path) -> None:
    """Causes and reasons that this version does not know are added up under their names, and no time is no error."""
    lines = [
        {"event": "CallerWaited", "cause": "drain", "seconds": 2.0, "waited_for": {"disk": 1.0}, "save": None},
        {"event": "CallerWaited", "cause": "call", "seconds": 0.0, "waited_for": {"slot": 0.0}, "save": None},
    ]
    times = [{"time_ns": number * 10**10, "monotonic_ns": number * 10**10} for number in (1, 2)]
    content = "".join(json.dumps(line | time) + "\n" for line, time in zip(lines, times, strict=True))
    (tmp_path / "j").write_text('{"journal": 1, "lost": 0}\n' + content)
    found = report_of(read_journal(tmp_path / "j"))
    assert (found.seconds["drain"], found.waited_for["disk"], found.seconds["call"]) == (2.0, 1.0, 0.0)
    assert trace_of([read_journal(tmp_path / "j")])["traceEvents"]


async def test_a_trace(tmp_path: Path) -> None:
    with Journal(tmp_path / "j"), watched(events.SaveWritten) as written:
        await use(tmp_path / "run")
        for event in ALL_KINDS:
            events.emit(event)
    trace = trace_of([read_journal(tmp_path / "j")])
    trace_schema.check(trace)
    assert sorted(trace_schema.saves(trace)) == [(0, f"save step {step}", 1, 1) for step in (1, 2, 3)]
    slices = trace_schema.phases(trace)
    assert [slices.count(name) for name in ("stage", "write", "commit")] == [3, 3, 3]
    instants = {one["name"] for one in trace["traceEvents"] if one["ph"] == "i"}
    assert {"step 1", "step 2", "step 3", "Retried", "waited: fence", "RunPruned"} <= instants
    counted = [one["args"]["bytes"] for one in trace["traceEvents"] if one["name"] == "bytes written"]
    assert counted == list(accumulate(event.nbytes for event in written))
    assert len(counted) == 3


def test_journals_of_one_rank_have_one_clock_and_saves_of_their_own() -> None:
    def content(began_ns: int) -> JournalContent:
        save = events.SaveContext("save", "a", rank=1)
        kinds = (events.SaveStarted, events.SavePlanned, partial(SaveCommitted, nbytes=1, seconds={}))
        seen = [kind(save, time_ns=began_ns + number * 1000) for number, kind in enumerate(kinds)]
        return JournalContent([(event.time_ns, event) for event in seen], 1, 0, 0)

    trace = trace_of([content(5_000_000), content(2_000_000)])
    trace_schema.check(trace)
    assert trace_schema.saves(trace) == [(1, "save", 1, 1)] * 2
    assert [one["ts"] for one in trace["traceEvents"] if one["name"] == "save"] == [3000, 3002, 0, 2]
    assert [one["args"]["outcome"] for one in trace["traceEvents"] if one["name"] == "save" and one["ph"] == "e"] == [
        "committed", "committed",
    ]  # fmt: skip


def test_a_save_whose_process_was_killed_ends_in_the_trace(tmp_path: Path) -> None:
    save = events.SaveContext("save", "a", step=1)
    with Journal(tmp_path / "j"):
        events.emit(events.SaveStarted(save))
        events.emit(events.SavePlanned(save))
    trace = trace_of([read_journal(tmp_path / "j")])
    trace_schema.check(trace)
    assert trace_schema.saves(trace) == [(0, "save step 1", 1, 1)]
    end = trace["traceEvents"][-1]
    assert end["ph"] == "e"
    assert end["args"]["outcome"] == "unknown"


def command(*words: object, code: int = 0) -> str:
    """Run the command line and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "sidestream_cli", *map(str, words)],
        env={**os.environ, "NO_COLOR": "1"}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


async def test_the_commands(tmp_path: Path) -> None:
    with Journal(tmp_path / "j"):
        await use(tmp_path / "run")
    shown = command("report", tmp_path / "j")
    assert "lost to 3 saves" in shown
    assert all(cause in shown for cause in ("call", "staged", "fence", "waited for slot", "age of the last commit"))
    (found,) = json.loads(command("report", tmp_path / "j", "--json"))
    assert (found["saves"], found["last_step"]) == (3, 3)
    command("trace", tmp_path / "j", "-o", tmp_path / "trace.json")
    trace_schema.check(json.loads((tmp_path / "trace.json").read_text()))
    command("report", tmp_path / "missing", code=2)
    (tmp_path / "page").write_text("some\ntext\n")
    command("report", tmp_path / "page", code=2)  # it is not a report of no saves
