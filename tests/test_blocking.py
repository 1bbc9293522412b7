"""The same verbs without a loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import warm
from states import assert_same, model_and_optimizer

import sidestream.blocking
from sidestream import LoadOptions, SaveOptions
from sidestream._engine.calls import call_from_thread
from sidestream._runtime.caller import ThreadCaller, run_by_caller
from sidestream.errors import CheckpointExistsError, CheckpointNotFoundError, InvalidOptionError, WrongLoopError


def test_the_verbs(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    state = {"model": model, "optimizer": optimizer, "step": 3}
    info = sidestream.blocking.save(state, tmp_path / "a")
    assert info.url == str(tmp_path / "a")
    with pytest.raises(CheckpointExistsError):
        sidestream.blocking.save(state, tmp_path / "a")
    fresh = {"model": model_and_optimizer(seed=8)[0], "step": 0}
    report = sidestream.blocking.load(fresh, tmp_path / "a")
    assert report.save_id == info.save_id
    assert_same(model.state_dict(), fresh["model"].state_dict())
    checkpoint = sidestream.blocking.open_checkpoint(tmp_path / "a")
    assert torch.equal(checkpoint.tensor("model.0.weight", rows=slice(2, 5)), model[0].weight[2:5])
    assert checkpoint.value("step") == 3
    assert checkpoint.state_dict()["step"] == 3
    assert len(checkpoint) == len(list(checkpoint))
    with pytest.raises(CheckpointNotFoundError):
        sidestream.blocking.open_checkpoint(tmp_path / "b")


def test_async_save_and_checkpointer(tmp_path: Path) -> None:
    tensor = torch.arange(1000)
    pending = sidestream.blocking.async_save({"t": tensor}, tmp_path / "a")
    pending.staged.result()
    tensor.zero_()
    assert pending.result(60).url == str(tmp_path / "a")
    assert pending.done()
    assert pending.outcome == "committed"
    assert not pending.cancel()
    with sidestream.blocking.Checkpointer(tmp_path / "run") as checkpoints:
        assert checkpoints.save({"t": torch.ones(2)}, step=4).step == 4
        assert checkpoints.steps() == [4]
        assert checkpoints.latest() == 4
        target = {"t": torch.zeros(2)}
        assert checkpoints.restore(target) == 4
        assert target["t"].tolist() == [1, 1]
    assert sidestream.blocking.open_checkpoint(tmp_path / "a").tensor("t").tolist() == list(range(1000))


async def test_inside_a_loop_they_refuse(tmp_path: Path) -> None:
    for call in (
        lambda: sidestream.blocking.save({}, tmp_path / "a"),
        lambda: sidestream.blocking.Checkpointer(tmp_path),
    ):
        with pytest.raises(WrongLoopError, match="await the functions of sidestream"):
            call()


async def test_a_synchronous_framework_in_a_notebook(tmp_path: Path) -> None:
    """Its code runs on the loop's thread, and stops the loop on purpose."""

    def train() -> None:
        with sidestream.blocking.Checkpointer(tmp_path / "run") as checkpoints:
            checkpoints.save({"w": torch.ones(3)}, step=1)
            target = {"w": torch.zeros(3)}
            assert checkpoints.restore(target) == 1
            assert target["w"].tolist() == [1, 1, 1]

    with pytest.raises(WrongLoopError, match=r"with sidestream\.blocking\.stopping_the_loop\(\)"):
        train()
    with sidestream.blocking.stopping_the_loop():
        train()
    with pytest.raises(WrongLoopError):
        sidestream.blocking.load({}, tmp_path / "run" / "step-1")


@pytest.mark.parametrize(
    "name", ["async_save", "convert", "copy", "load", "open_checkpoint", "remove", "save", "verify"]
)
def test_the_signatures_are_those_of_the_async_verbs(name: str) -> None:
    theirs, ours = inspect.signature(getattr(sidestream, name)), inspect.signature(getattr(sidestream.blocking, name))
    assert ours.parameters == theirs.parameters


@pytest.mark.parametrize("kind", ["Checkpoint", "Checkpointer"])
def test_the_classes_have_the_methods_of_the_async_ones(kind: str) -> None:
    theirs, ours = getattr(sidestream, kind), getattr(sidestream.blocking, kind)
    # What needs a loop: iterating, contexts of their own, callbacks on the loop, and waiting without the error.
    left_out = {
        "aclose",
        "ended",
        "fetch",
        "following",
        "on_preemption",
        "open",
        "preempted",
        "watch",
        "mark_retrieved",
        "settled",
        "unretrieved",
        "when_done",
    }
    for name, method in vars(theirs).items():
        if name.startswith("_") or name in left_out:
            continue
        other = inspect.getattr_static(ours, name, None)
        assert other is not None, name
        if inspect.isfunction(method):
            expected = [one for one in inspect.signature(method).parameters if one != "self"]
            assert [one for one in inspect.signature(other).parameters if one != "self"] == expected, name


def test_a_step_is_leased_while_it_is_read(tmp_path: Path) -> None:
    with (
        sidestream.blocking.Checkpointer(tmp_path / "run") as every,
        sidestream.blocking.Checkpointer(tmp_path / "run", keep=sidestream.KeepLast(1)) as checkpoints,
    ):
        every.save({"w": torch.ones(3)}, step=1)
        every.save({"w": torch.zeros(3)}, step=2)
        with pytest.raises(KeyError, match="mine"), checkpoints.reading(1) as step:
            assert checkpoints.prune().leased == ("step-1",)
            assert step.tensor("w").tolist() == [1, 1, 1]
            raise KeyError("mine")
        assert checkpoints.prune().deleted == ("step-1",)
        with pytest.raises(sidestream.errors.CheckpointNotFoundError), checkpoints.reading(1):
            pass


def test_a_keyword_that_is_not_known(tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: sidestream.blocking.save({"n": 1}, tmp_path / "a", saver="process"),  # type: ignore[call-arg]
        lambda: sidestream.blocking.async_save({"n": 1}, tmp_path / "a", saver="process"),  # type: ignore[call-arg]
        lambda: sidestream.blocking.open_checkpoint(tmp_path / "a", saver="process"),  # type: ignore[call-arg]
        lambda: sidestream.blocking.Checkpointer(tmp_path / "run", saver="process"),  # type: ignore[call-arg]
    ]
    for call in calls:
        with pytest.raises(TypeError, match="unexpected keyword argument 'saver'"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_save_needs_no_loop(tmp_path: Path) -> None:
    tensor = torch.arange(1000)
    pending = sidestream.async_save({"t": tensor}, tmp_path / "a")
    pending.staged.result(60)
    tensor.zero_()
    assert pending.result(60).url == str(tmp_path / "a")
    assert sidestream.blocking.open_checkpoint(tmp_path / "a").tensor("t").tolist() == list(range(1000))


def test_in_a_forked_child(tmp_path: Path) -> None:
    sidestream.blocking.save({"t": torch.ones(3)}, tmp_path / "a")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sidestream.blocking.save({"t": torch.ones(3)}, tmp_path / "b")
            code = 0
        finally:
            os._exit(code)
    signal.alarm(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sidestream.blocking.open_checkpoint(tmp_path / "b").tensor("t").tolist() == [1, 1, 1]


def test_the_interpreter_ends_by_itself(tmp_path: Path) -> None:
    code = """
import sys, torch, sidestream.blocking
pending = sidestream.blocking.async_save({"t": torch.ones(1 << 20)}, sys.argv[1])
if len(sys.argv) > 2:
    print(pending.result().url)
"""
    for arguments in ([str(tmp_path / "a"), "wait"], [str(tmp_path / "b")]):
        done = warm.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a" / ".metadata").exists()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left in (["a"], ["a", "b"]), "what was in flight at exit is whole or absent"


# --- the caller's code ---------------------------------------------------------------------------------------------

_told: ContextVar[str] = ContextVar("told", default="nothing")


def surroundings() -> tuple[Any, ...]:
    """Return the current state of a thread. tests/gpu tests CUDA's device in the same way."""
    return (
        _told.get(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


@contextmanager
def unusual() -> Iterator[tuple[Any, ...]]:
    token = _told.set("something")
    try:
        with torch.device("meta"), torch.no_grad():
            yield surroundings()
    finally:
        _told.reset(token)


class Watching:
    """Notes by which thread, and within what, each of its methods is called."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, tuple[Any, ...]]] = []

    def note(self, method: str) -> None:
        self.seen.append((method, threading.get_ident(), surroundings()))

    def state_dict(self) -> dict[str, Any]:
        self.note("state_dict")
        return {"t": torch.ones(3, device="cpu"), "n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.note("load_state_dict")

    def progress(self, done: int, total: int) -> None:
        self.note("progress")


def test_code_of_the_caller_runs_in_its_thread(tmp_path: Path) -> None:
    watching = Watching()
    state = {"w": watching}
    with unusual() as here:
        sidestream.blocking.save(state, tmp_path / "a")
        sidestream.blocking.async_save(state, tmp_path / "b").result()
        sidestream.blocking.load(state, tmp_path / "a", options=LoadOptions(progress=watching.progress))
        with sidestream.blocking.Checkpointer(tmp_path / "run") as checkpoints:
            checkpoints.save(state, step=1)
            assert checkpoints.restore(state, options=LoadOptions(progress=watching.progress)) == 1
        sidestream.blocking.verify(tmp_path / "a", progress=watching.progress)
    assert {method for method, _, _ in watching.seen} == {"state_dict", "load_state_dict", "progress"}
    assert {(thread, within) for _, thread, within in watching.seen} == {(threading.get_ident(), here)}


def test_a_save_that_waits_for_its_slot(tmp_path: Path) -> None:
    """It captures its state in the call, and copies when the thread that made the call may have ended."""
    watching, may_plan = Watching(), threading.Event()
    with sidestream.blocking.Checkpointer(tmp_path / "run", slots=1) as checkpoints:
        held = SaveOptions(names=lambda name: name if may_plan.wait(60) else None)
        checkpoints.async_save({"t": torch.ones(3)}, step=1, options=held)
        with unusual() as here:
            queued = checkpoints.async_save({"w": watching}, step=2)
        assert watching.seen == [("state_dict", threading.get_ident(), here)]
        assert not queued.staged.done()
        may_plan.set()
        assert queued.result(60).step == 2


def test_a_state_is_not_captured_later(tmp_path: Path) -> None:
    """No loop of the caller would do it."""
    with pytest.raises(InvalidOptionError, match=r"when_full='latest'.*sidestream\.Checkpointer"):
        sidestream.blocking.Checkpointer(tmp_path / "run", when_full="latest")
    assert list(tmp_path.iterdir()) == []


def test_locks_of_the_caller(tmp_path: Path) -> None:
    """An object may take a lock that the caller holds, as it may in any call."""
    lock = threading.RLock()

    class Locked(Watching):
        def state_dict(self) -> dict[str, Any]:
            assert lock.acquire(timeout=60)
            lock.release()
            return super().state_dict()

    with lock:
        sidestream.blocking.save({"l": Locked()}, tmp_path / "a")
        sidestream.blocking.load({"l": Locked()}, tmp_path / "a")


def test_calls_within_a_call(tmp_path: Path) -> None:
    class Nested(Watching):
        def state_dict(self) -> dict[str, Any]:
            sidestream.blocking.save({"inner": torch.ones(2)}, tmp_path / f"b{len(self.seen)}")
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            sidestream.blocking.load({"inner": torch.zeros(2)}, tmp_path / "b0")

    one = Nested()
    sidestream.blocking.save({"n": one}, tmp_path / "a")
    sidestream.blocking.load({"n": one}, tmp_path / "a")
    assert [method for method, _, _ in one.seen] == ["state_dict", "state_dict", "load_state_dict"]
    assert {thread for _, thread, _ in one.seen} == {threading.get_ident()}


def test_code_of_one_thread_holds_up_no_call_of_another(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    class Held(Watching):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            entered.set()
            assert go_on.wait(60)

    sidestream.blocking.save({"h": Held()}, tmp_path / "a")
    with ThreadPoolExecutor(4) as threads:
        held = threads.submit(sidestream.blocking.load, {"h": Held()}, tmp_path / "a")
        assert entered.wait(60)
        saves = [threads.submit(sidestream.blocking.save, {"n": 1}, tmp_path / f"b{n}") for n in range(3)]
        assert all(one.result(60).nbytes for one in saves)
        assert not held.done()
        go_on.set()
        assert held.result(60).loaded


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell in the background makes its children ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("method", ["state_dict", "load_state_dict"])
def test_an_interrupt_in_code_of_the_caller(method: str, tmp_path: Path) -> None:
    class Interrupted(Watching):
        def note(self, here: str) -> None:
            super().note(here)
            if here == method:
                signal.raise_signal(signal.SIGINT)

    sidestream.blocking.save({"i": Watching()}, tmp_path / "a")
    one = Interrupted()
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            sidestream.blocking.load({"i": one}, tmp_path / "a")
    if method == "state_dict":
        with pytest.raises(KeyboardInterrupt):
            sidestream.blocking.save({"i": one}, tmp_path / "b")
        assert not (tmp_path / "b").exists()
    sidestream.blocking.load({"i": Watching()}, tmp_path / "a")


def _open(path: Path) -> None:
    sidestream.blocking.open_checkpoint(path / "none")


def _load(path: Path) -> None:
    sidestream.blocking.load({"w": torch.zeros(3)}, path / "none")


@pytest.mark.parametrize("call", [_open, _load])
def test_an_error_of_a_call_is_in_no_reference_cycle(call: Callable[[Path], None], tmp_path: Path) -> None:
    """What the frames of its traceback refer to is freed with it."""
    with pytest.raises(CheckpointNotFoundError):  # the first call imports, which leaves work to the collector
        call(tmp_path)
    gc.collect()
    gc.disable()
    try:
        try:
            call(tmp_path)
        except CheckpointNotFoundError as error:
            freed = weakref.ref(error)
        deadline = time.monotonic() + 60
        while freed() is not None and time.monotonic() < deadline:  # the loop drops it a little later
            time.sleep(1e-3)
        assert freed() is None
    finally:
        gc.enable()


def test_an_error_of_the_callers_code_is_in_no_reference_cycle() -> None:
    """What its frames refer to is freed with it, and not at the next garbage collection."""
    freed: list[weakref.ref[object]] = []

    def code() -> None:
        local = torch.zeros(1)
        freed.append(weakref.ref(local))
        raise ValueError(f"refers to {local}")

    async def work() -> None:
        with suppress(ValueError):
            await run_by_caller(code)

    call_from_thread(work)
    freed.clear()
    gc.collect()
    gc.disable()
    try:
        call_from_thread(work)
        assert [one() for one in freed] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("begun", [False, True])
def test_code_for_a_call_that_was_interrupted_while_it_ended(begun: bool) -> None:
    """Several signals in a row end the call without ``leave``. Its code is given up all the same."""
    caller = ThreadCaller()
    present = caller.present()

    def run() -> int:
        return asyncio.run(caller.run(threading.get_ident))

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(run)
        while not caller._queue:
            time.sleep(1e-3)
        caller._queue[0].begun = begun
        del present
        with pytest.raises(BaseException, match="interrupted" if begun else "cannot be called"):
            done.result(60)


def test_an_interrupt_at_every_step(tmp_path: Path) -> None:
    """Ctrl-C wherever the interpreter looks for signals while a thread waits for its call: when a function begins, and
    when one that is written in C has returned. No lock stays acquired."""
    state = {"a": Watching(), "b": Watching()}
    sidestream.blocking.save(state, tmp_path / "a")
    waiting = ("caller.py", "calls.py", "blocking.py", "threading.py", "_base.py")
    left = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(waiting):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    def give_up(*_: object) -> None:
        raise TimeoutError("a call hangs")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 120, 1)
    try:
        for step in itertools.count(1):
            left = step
            with suppress(KeyboardInterrupt):
                sys.setprofile(profile)
                sidestream.blocking.load(state, tmp_path / "a")
            sys.setprofile(None)
            if left > 0:
                break
    finally:
        sys.setprofile(None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert step > 30
    assert sidestream.blocking.load(state, tmp_path / "a").loaded


# An interrupt in the callback of a weak reference cannot be raised: Python prints it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_time(tmp_path: Path) -> None:
    """Ctrl-C between any two instructions: the call ends, and the next one works."""
    state = {f"w{number}": Watching() for number in range(20)}
    sidestream.blocking.save(state, tmp_path / "a")
    calls: list[int] = []  # not empty while an interrupt belongs to a call: a late one must not end this program

    def interrupt(*_: object) -> None:
        if calls:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(60):
            with suppress(KeyboardInterrupt):
                calls.append(number)
                signal.setitimer(signal.ITIMER_REAL, 0.0005 * (number + 1))
                sidestream.blocking.load(state, tmp_path / "a")
                calls.clear()
            calls.clear()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert sidestream.blocking.load(state, tmp_path / "a").loaded
