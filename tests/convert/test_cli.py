"""The command line as a user runs it: processes, exit codes, and what they print."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from contextlib import closing, nullcontext, suppress
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import warm
from _s3_server import KEY, SECRET, serving
from safetensors.torch import load_file

import sidestream
from sidestream._staging.runtime import CudaRuntime
from sidestream_cli import machine

# A shell in the background ignores Ctrl-C for all that it starts.
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-c", f"{INTERRUPTIBLE}; from sidestream_cli import main; main()"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a run."""
    directory = tmp_path_factory.mktemp("cli") / "run"
    with sidestream.blocking.Checkpointer(directory) as checkpoints:
        for step in (1, 2):
            state = {"model": {"w": torch.arange(600.0).reshape(20, 30) * step, "b": torch.ones(3)}, "step": step}
            checkpoints.save(state, step=step)
    return directory


def sidestream_(*words: object, code: int = 0, shown: str = "") -> str:
    """Run it and return what it prints, of an error what it says."""
    done = warm.run(
        [*COMMAND, *map(str, words)], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stdout if code < 2 or shown == "stdout" else done.stderr


def test_verify_of_a_run(tmp_path: Path) -> None:
    """With ``--all``; without it, the answer says that it is a run."""
    with sidestream.blocking.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save({"w": torch.full((500,), float(step))}, step=step)
    assert "step-1: ok\n1 verified" in sidestream_("verify", tmp_path, "--all")
    raw = bytearray((shard := next((tmp_path / "step-1").glob("*.distcp"))).read_bytes())
    raw[raw.index(torch.ones(500).numpy().tobytes())] ^= 1
    shard.write_bytes(raw)
    next((tmp_path / "step-2").glob("manifest-*")).unlink()
    shown = sidestream_("verify", tmp_path, "--all", code=1)
    assert "step-1: damaged\ndamaged: w: " in shown
    assert "step-2: damaged\n" in shown
    assert "step-3: ok\n" in shown
    found = json.loads(sidestream_("verify", tmp_path, "--all", "--json", code=1))
    assert [(one["name"], one["ok"]) for one in found] == [("step-1", False), ("step-2", False), ("step-3", True)]
    shown = sidestream_("verify", tmp_path, code=2)
    assert "a run with 3 steps" in shown
    assert "--all verifies each step" in shown


def test_ls_and_info_show_when_and_what_was_noted(tmp_path: Path) -> None:
    with sidestream.blocking.Checkpointer(tmp_path) as checkpoints:
        checkpoints.save({"w": torch.ones(3), "lr": 0.25}, step=1, metadata={"loss": 0.5}, files={"notes.txt": b"abc"})
    (listed,) = json.loads(sidestream_("ls", tmp_path, "--json"))
    assert (listed["metadata"], listed["files"]) == ({"loss": 0.5}, {"notes.txt": 3})
    assert abs(listed["saved_at"] - time.time()) < 3600
    year = time.strftime("%Y-", time.gmtime(listed["saved_at"]))
    for shown in (sidestream_("ls", tmp_path), sidestream_("info", tmp_path / "step-1")):
        assert year in shown
        assert "loss" in shown
        assert "notes.txt" in shown
    assert "0.25" in sidestream_("info", tmp_path / "step-1", "--values")
    told = json.loads(sidestream_("info", tmp_path / "step-1", "--values", "--json"))
    assert (told["step"], told["saved_at"], told["metadata"]) == (1, listed["saved_at"], {"loss": 0.5})
    assert told["files"] == {"notes.txt": 3}
    assert [(one["name"], one.get("value")) for one in told["entries"]] == [("w", None), ("lr", "0.25")]
    assert json.loads(sidestream_("info", tmp_path / "step-1", "*.yaml", "--files", "--json")) == {}
    assert json.loads(sidestream_("info", tmp_path / "step-1", "--files", "--json")) == {"notes.txt": 3}
    torch.save({"w": torch.ones(2), "lr": 0.125}, tmp_path / "file.pt")
    assert "0.125" in sidestream_("info", tmp_path / "file.pt", "--values")


def test_prune_refuses_a_metric_that_no_step_has(tmp_path: Path) -> None:
    with sidestream.blocking.Checkpointer(tmp_path) as checkpoints:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
            checkpoints.save({"w": torch.ones(3)}, step=step, metadata={"loss": loss, "note": "a"})
    for more in ([], ["--dry-run"]):
        shown = sidestream_("prune", tmp_path, "--keep-last", 1, "--keep-best", "lsos=3", *more, code=2)
        assert "no step has the metric 'lsos'" in shown
        assert "the metrics of this run are: loss" in shown
    assert "--best-is 'median' has to be" in sidestream_(
        "prune", tmp_path, "--keep-best", "loss", "--best-is", "median", code=2
    )
    shown = sidestream_("prune", tmp_path, "--keep-last", 1, "--keep-best", "loss", "--dry-run")
    assert "best by loss: step 2\nwould delete step-1" in shown
    assert len(json.loads(sidestream_("ls", tmp_path, "--json"))) == 3


# --- doctor: each piece of advice is taken ---------------------------------------------------------------------------


def advice(root: Path, directory: Path) -> dict[str, str]:
    return {one.what: one.advice for one in machine.machine(str(directory), root) if one.advice}


def kernel(root: Path, *, huge_pages: str = "[never]") -> Path:
    """What the kernel shows of a machine, in which huge pages are off."""
    files = {"enabled": f"always madvise {huge_pages}", "shmem_enabled": f"always within_size advise {huge_pages} deny"}
    made(root / "sys/kernel/mm/transparent_hugepage", files)
    made(root / "proc", {"meminfo": "MemTotal: 9000000 kB\nMemAvailable: 4194304 kB"})
    return root


def test_the_advice_about_huge_pages(tmp_path: Path) -> None:
    """Its commands run, and then nothing is advised any more."""
    for what in ("huge pages", "huge pages, shared"):
        command, _, why = advice(kernel(tmp_path), tmp_path)[what].partition(" (as root): ")
        assert why.endswith("is mapped faster")
        subprocess.run(["bash", "-c", command], check=True)
        assert what not in advice(tmp_path, tmp_path)
    assert {"huge pages", "huge pages, shared"}.isdisjoint(advice(kernel(tmp_path, huge_pages="[advise]"), tmp_path))


def test_the_advice_about_memory(tmp_path: Path) -> None:
    """A state is staged whole; with ``streaming=True`` it passes through 256 MiB; a stager takes another budget."""
    told = advice(kernel(tmp_path / "root"), tmp_path)
    assert "SaveOptions(streaming=True) takes 256 MiB" in told["free memory"]
    assert "AsyncStager(budget_bytes=...)" in told["staging budget"]
    state = {"w": torch.ones(80 << 20)}  # 320 MiB
    with closing(sidestream.AsyncStager(budget_bytes=1 << 30)) as stager:
        stager.stage(state).result().release()
        assert (stager.statistics().budget_bytes, stager.statistics().peak_leased_bytes >> 20) == (1 << 30, 320)
    counted = """
import sys, torch, sidestream
from sidestream._runtime.memory_maps import MemoryMap
make, mapped = MemoryMap.__new__, []
def counted(*args, **keywords):
    mapped.append(memory := make(*args, **keywords))  # all of it, also what is free again: more than any peak
    return memory
MemoryMap.__new__ = counted
sidestream.blocking.save({"w": torch.ones(80 << 20)}, sys.argv[1], options=sidestream.SaveOptions(streaming=True))
print(sum(map(len, mapped)) >> 20)
assert sidestream.blocking.verify(sys.argv[1]).ok
"""
    command = [sys.executable, "-c", counted, str(tmp_path / "streamed")]
    done = subprocess.run(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert 0 < int(done.stdout) <= 256


def test_the_free_memory_is_that_of_the_container(tmp_path: Path) -> None:
    root = kernel(tmp_path)
    assert {one.what: one.here for one in machine.machine(str(tmp_path), root)}["free memory"] == "4.0 GiB"
    group = {
        "memory.max": str(3 << 30),
        "memory.current": str(2 << 30),
        "memory.stat": f"anon 1\ninactive_file {1 << 30}",
    }
    made(root / "sys/fs/cgroup", group)
    assert {one.what: one.here for one in machine.machine(str(tmp_path), root)}["free memory"] == "2.0 GiB"
    made(root / "sys/fs/cgroup", {"memory.max": "max"})
    assert {one.what: one.here for one in machine.machine(str(tmp_path), root)}["free memory"] == "4.0 GiB"
    (root / "proc/meminfo").unlink()
    assert {one.what: one.here for one in machine.machine(str(tmp_path), root)}["free memory"] == "unknown"


def test_the_advice_about_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An extra that is said to be missing exists, and asks for a package that is not installed."""
    requires = metadata.requires("sidestream") or []
    extras = {extra for extra in metadata.metadata("sidestream").get_all("Provides-Extra", []) if extra != "all"}
    found = {one.what: one for one in machine.machine(str(tmp_path))}["extras"]
    missing = set(filter(None, found.advice.partition("[")[2].partition("]")[0].split(",")))
    assert set(found.here.split(", ")) | missing == extras
    monkeypatch.setattr(machine, "_is_installed", lambda package: package == "typer")
    found = {one.what: one for one in machine.machine(str(tmp_path))}["extras"]
    assert found.here == "none"
    assert found.advice.startswith("for the others: pip install 'sidestream[")
    assert set(found.advice.partition("[")[2].partition("]")[0].split(",")) == extras
    assert all(any(f"extra == '{extra}'" in one.replace('"', "'") for one in requires) for extra in extras)


def test_the_advice_about_checksums() -> None:
    """Without isal it is advised, and with it the checksums are isal's."""
    for missing, engine, said in (("isal", "zlib", "pip install isal"), ("nothing", "isal", "")):
        program = f"""
import json, sys
sys.modules[{missing!r}] = None
from sidestream_cli import machine
print(json.dumps([[one.here, one.advice] for one in machine.machine(".") if one.what == "checksums"]))
"""
        done = subprocess.run(
            [sys.executable, "-c", program], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, timeout=300, check=True
        )
        ((here, told),) = json.loads(done.stdout)
        assert here == engine
        assert told.startswith(said)
        assert bool(told) == bool(said)


def test_the_advice_about_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command runs as it is printed. Without direct I/O saves work, and with a directory that cannot be written
    they fail, as doctor says."""
    place = tmp_path / "with a space"
    place.mkdir()
    command, _, rest = advice(Path("/"), place / "not" / "yet")["free space"].partition(" measures")
    assert (rest, shlex.split(command)[-1]) == (" the disk", str(place))
    assert "load, verified" in sidestream_(*shlex.split(command)[1:], "--mib", "64")
    assert list(place.iterdir()) == []

    opened = os.open

    def without_direct_io(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return opened(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", without_direct_io)
    found = {one.what: one for one in machine.machine(str(place))}["direct I/O"]
    assert (found.here, found.advice) == ("no", "saves write through the page cache")
    sidestream.blocking.save({"w": torch.ones(4 << 20)}, place / "c")
    assert sidestream.blocking.verify(place / "c").ok

    (place / "file").touch()
    found = {one.what: one for one in machine.machine(str(place / "file"))}["directory"]
    assert (found.here, found.advice) == (f"{place}/file cannot be written: Not a directory", "saves to it fail")
    with pytest.raises(sidestream.errors.StorageError):
        sidestream.blocking.save({"w": torch.ones(2)}, place / "file" / "c")


class Cuda:
    """The CUDA of a machine, in place of ``torch.cuda``: a device for each code that registering returns on it."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.current, self.calls = codes, -1, list[tuple[int, str]]()

    def is_available(self) -> bool:
        return bool(self.codes)

    def device_count(self) -> int:
        return len(self.codes)

    def get_device_properties(self, device: torch.device) -> Any:
        name = {"name": "a GPU", "total_memory": 80 << 30}
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A + device.index, pci_device_id=0, **name)

    def device(self, index: int) -> Any:
        self.current = index
        return nullcontext()

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((self.current, "register"))
        assert (address % mmap.PAGESIZE, nbytes) == (0, mmap.PAGESIZE)
        return self.codes[self.current]

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append((self.current, "unregister"))
        return 0

    def cudaGetErrorString(self, code: int) -> str:
        return "out of memory"


def made(root: Path, files: dict[str, str]) -> Path:
    """Files below ``root``, as the kernel shows them in ``/sys``."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def test_the_advice_about_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Node 9 does not exist, so that memory cannot be bound to it: the processors to start on are named."""
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    sysfs = made(tmp_path / "sys", {f"devices/system/node/node{node}/cpulist": cpus for node in (0, 9)})
    made(sysfs, {f"bus/pci/devices/0000:{bus}:00.0/numa_node": node for bus, node in (("1a", "9"), ("1b", "-1"))})
    cuda = Cuda(0, 0, 2, 801)
    monkeypatch.setattr(torch, "cuda", cuda)
    found = {one.what: one for one in machine.machine(str(tmp_path), tmp_path)}
    assert found["NUMA nodes"].here == "2"
    assert (found["huge pages"].here, found["huge pages"].advice) == ("unknown", "")
    whole = "a GPU, 80.0 GiB, NUMA node 9, to which memory cannot be bound, host memory can be registered"
    assert found["cuda:0"].here == whole
    started = found["cuda:0"].advice.removeprefix("start its rank there: ")
    subprocess.run([*shlex.split(started), sys.executable, "-c", ""], check=True)
    assert started == f"taskset -c {cpus}"
    assert found["cuda:1"].here == "a GPU, 80.0 GiB, NUMA node unknown, host memory can be registered"
    assert found["cuda:1"].advice.startswith("start its rank on CPUs near it: taskset -c ")
    assert found["cuda:2"].here.endswith("host memory cannot be registered (out of memory)")
    assert found["cuda:2"].advice.endswith("; staging from it fails")
    assert found["cuda:3"].advice.endswith("; copies go without it, more slowly")
    counted = [(index, what) for index in (0, 1) for what in ("register", "unregister")]
    assert cuda.calls == [*counted, (2, "register"), (3, "register")]
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    for index, fails in ((2, True), (3, False)):  # as the stager registers memory
        cuda.current = index
        with pytest.raises(sidestream.errors.SidestreamError) if fails else nullcontext():
            assert CudaRuntime().register(address, mmap.PAGESIZE) is False


def test_doctor_on_a_machine_with_one_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch, "cuda", Cuda(0))
    made(tmp_path / "sys", {"devices/system/node/node0/cpulist": "0"})
    found = {one.what: one for one in machine.machine(str(tmp_path), tmp_path)}
    assert found["NUMA nodes"].here == "1"
    assert (found["cuda:0"].here, found["cuda:0"].advice) == ("a GPU, 80.0 GiB, host memory can be registered", "")
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    assert not any(one.what.startswith("cuda") for one in machine.machine(str(tmp_path), tmp_path))
    assert cuda.calls == []


def test_ls_and_info(run: Path) -> None:
    steps = json.loads(sidestream_("ls", run, "--json"))
    assert [(one["step"], one["name"], one["tensors"]) for one in steps] == [(1, "step-1", 2), (2, "step-2", 2)]
    shown = sidestream_("info", run / "step-1")
    for word in ("model.w", "float32", "20x30", "2.3 KiB", "__0_1.distcp", "2 tensors", "1 values"):
        assert word in shown


def test_ls_of_a_wrong_path_says_what_is_beside_it(run: Path) -> None:
    said = sidestream_("ls", run.parent / "rnu", code=2)
    assert "there is nothing of that name. Beside it: run" in said


def test_verify(tmp_path: Path) -> None:
    sidestream.blocking.save({"w": torch.arange(1000.0), "fine": torch.ones(2)}, tmp_path / "broken")
    shard = tmp_path / "broken" / "__0_1.distcp"
    raw = bytearray(shard.read_bytes())
    raw[raw.index(torch.arange(1000.0)[500:].numpy().tobytes())] ^= 1
    shard.write_bytes(raw)
    shown = sidestream_("verify", tmp_path / "broken", code=1)
    assert "damaged: w: " in shown
    assert "1 verified, 1 damaged" in shown
    assert "CheckpointNotFoundError" in sidestream_("verify", tmp_path / "nothing", code=2)


def test_the_reader_of_the_output_is_gone(run: Path, tmp_path: Path) -> None:
    """The exit code is not 0: what was found may not have been read."""
    sidestream.blocking.save({"w": torch.arange(1000.0)}, tmp_path / "broken")
    shard = tmp_path / "broken" / "__0_1.distcp"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    for target in (run / "step-1", tmp_path / "broken"):
        reading, writing = os.pipe()
        os.close(reading)
        words = [*COMMAND, "verify", str(target)]
        done = subprocess.run(words, env=ENVIRONMENT, stdout=writing, stderr=subprocess.PIPE, timeout=300, check=False)
        os.close(writing)
        assert done.returncode in (1, 2)
        assert done.stderr == b""


def test_ls_shows_damage_beside_what_is_good(tmp_path: Path) -> None:
    with sidestream.blocking.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save({"w": torch.ones(3)}, step=step)
    next((tmp_path / "step-1").glob("manifest-*")).write_bytes(b"{}")
    damaged, good = json.loads(sidestream_("ls", tmp_path, "--json"))
    assert "manifest" in damaged["damage"]
    assert (good["name"], good["tensors"]) == ("step-2", 1)
    assert "secret" not in sidestream_("ls", "memory://user:secret@host/run", code=2)


def test_diff(run: Path) -> None:
    found: list[dict[str, Any]] = json.loads(sidestream_("diff", run / "step-1", run / "step-2", "--json", code=1))
    assert found == [
        {"name": "model.w", "what": "changed", "largest": 599.0, "inside": [], "more": False},
        {
            "name": "step",
            "what": "another value",
            "largest": None,
            "inside": [{"path": "", "what": "1 against 2"}],
            "more": False,
        },
    ]


def test_convert(run: Path, tmp_path: Path) -> None:
    """Progress is shown on a terminal, and stands in nobody's way elsewhere."""
    target = tmp_path / "model.safetensors"
    words = ("--select", "model.*", "--rename", r"^model\.=", "--dtype", "bfloat16")
    report = json.loads(sidestream_("convert", run / "step-2", target, *words, "--json"))
    assert report["tensors"] == ["w", "b"]
    assert load_file(target)["w"].dtype == torch.bfloat16
    assert "float31" in sidestream_("convert", run / "step-2", target, "--dtype", "float31", code=2)
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    ours, theirs = pty.openpty()
    words = ("convert", str(run / "step-2"), str(tmp_path / "shown.pt"))
    child = warm.Popen([*COMMAND, *words], env={**ENVIRONMENT, "TERM": "xterm"}, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert child.wait(300) == 0
    assert b"converting" in shown
    assert b"converting" not in child.communicate()[0]


def test_doctor_and_bench(tmp_path: Path) -> None:
    found = json.loads(sidestream_("doctor", tmp_path, "--json"))
    assert found[0] == {"what": "sidestream", "here": metadata.version("sidestream"), "advice": ""}
    shown = {"torch", "checksums", "extras", "free memory", "staging budget", "huge pages", "huge pages, shared"}
    assert {one["what"] for one in found} >= shown | {"NUMA nodes", "accelerator", "direct I/O", "free space"}
    measured = json.loads(sidestream_("bench", tmp_path, "--mib", 64, "--json"))
    assert [one["what"] for one in measured[2:]] == ["stage", "save", "load, verified"]
    assert all(one["seconds"] > 0 and one["nbytes"] == 64 << 20 for one in measured)
    assert list(tmp_path.iterdir()) == []


def test_copy_prune_and_single_files(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    sidestream.blocking.copy(run / "step-1", copied / "step-1")
    report = json.loads(sidestream_("copy", run / "step-2", copied / "step-2", "--json"))
    assert report["verified"] == ["model.w", "model.b", "step"]
    told = json.loads(sidestream_("prune", copied, "--keep-last", 1, "--dry-run", "--json"))
    assert (told["deleted"], told["dry_run"], told["verified"]) == (["step-1"], True, None)
    assert {path.name for path in copied.iterdir()} == {"step-1", "step-2"}
    assert sidestream_("prune", copied, "--keep-last", 1).split() == ["deleted", "step-1"]
    assert {path.name for path in copied.iterdir() if path.name != ".leases"} == {"step-2"}

    sidestream.blocking.convert(copied / "step-2", tmp_path / "file.pt")
    assert sidestream_("diff", copied / "step-2", tmp_path / "file.pt").strip() == "no differences"
    raw = bytearray((tmp_path / "file.pt").read_bytes())
    raw[raw.index(torch.arange(2.0, 900.0, 2.0).numpy().tobytes())] ^= 1
    (tmp_path / "file.pt").write_bytes(raw)
    told = json.loads(sidestream_("copy", tmp_path / "file.pt", tmp_path / "t.pt", "--json", code=2, shown="stdout"))
    assert told["error"] == "CorruptCheckpointError"
    assert not (tmp_path / "t.pt").exists()


def test_object_storage_and_what_is_never_printed(run: Path, tmp_path: Path) -> None:
    with serving() as server:
        (tmp_path / "options.json").write_text(json.dumps({"secret": SECRET, "client_kwargs": {"region_name": "eu"}}))
        words = ("--storage-option", f"key={KEY}", "--storage-option", f"endpoint_url={server.endpoint}")
        words += ("--storage-option", f"@{tmp_path / 'options.json'}")
        target = [word.replace("--storage", "--target") for word in words]
        url = f"s3://{server.bucket}/run/step-1"
        shown = [sidestream_("copy", run / "step-1", url, *target, "--json")]
        shown += [sidestream_("verify", url, *words, "--json")]
        assert json.loads(shown[-1])["ok"]
        wrong = [word.replace(KEY, "AKIAWRONG0000000") for word in words]
        shown += [sidestream_("info", url, *wrong, code=2)]
        assert "AccessDeniedError" in shown[-1]
        assert not any(word in text for word in (KEY, SECRET) for text in shown)


def test_completion(tmp_path: Path) -> None:
    """As bash asks for it."""
    no_torch = "import sys; sys.modules['torch'] = None"  # importing it would fail
    asked = {"_SIDESTREAM_COMPLETE": "complete_bash", "COMP_WORDS": "sidestream co", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", f"{no_torch}; from sidestream_cli.app import app; app(prog_name='sidestream')"],
        env={**ENVIRONMENT, **asked}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert set(done.stdout.split()) == {"convert", "copy"}, done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--help", 0, "prune"),
        ("convert --help", 0, "--shard-mib"),
        ("--version", 0, metadata.version("sidestream")),
        ("", 2, "Usage"),
        ("info", 2, "Missing argument"),
        ("info a --nonsense", 2, "No such option"),
        ("prune run", 2, "--keep-last"),
        ("prune run --keep-best loss=x", 2, "METRIC=N"),
        ("prune run --keep-best loss=0", 2, "METRIC=N"),
        ("prune run --keep-last 0", 2, "--keep-last"),
        ("copy a b --budget-mib 1", 2, "--budget-mib"),
        ("doctor s3://bucket/run", 2, "a directory of this machine"),
        ("bench s3://bucket/run", 2, "a directory of this machine"),
        ("convert a b --rename x", 2, "REGEX=REPLACEMENT"),
        ("copy a b --target-option x", 2, "KEY=VALUE"),
        ("diff a b --storage-option @nothing.json", 2, "nothing.json"),
    ],
)
def test_help_and_usage_errors_do_not_wait_for_torch(words: str, code: int, said: str) -> None:
    last = "import atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    command = [*COMMAND[:-1], f"import sys; {last}; {COMMAND[-1]}", *words.split()]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done
    assert said in done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "False"


def completed(folder: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of ``words``."""
    environment = {
        **ENVIRONMENT,
        "_SIDESTREAM_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(["sidestream", *words]),
        "COMP_CWORD": str(len(words)),
    }
    last = "import atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    program = f"import sys; sys.argv[0] = 'sidestream'; {last}; {COMMAND[-1]}"
    done = subprocess.run(
        [*COMMAND[:-1], program], env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stderr.splitlines() == ["False"], "completion does not wait for torch"
    return done.stdout.split()


def test_completion_offers_what_is_there(run: Path) -> None:
    assert completed(run.parent, "in") == ["info"]
    assert completed(run.parent, "info", "r") == ["run/"]
    assert completed(run.parent, "info", "run/st") == ["run/step-1", "run/step-2"]
    assert completed(run.parent, "verify", "none/") == []
    assert completed(run.parent, "info", "run/step-1", "m") == ["model.*"]
    assert sorted(completed(run.parent, "info", "run/step-1", "model.")) == ["model.b", "model.w"]
    assert completed(run.parent, "info", "run", "m") == []
    assert completed(run.parent, "info", "s3://bucket/run", "m") == []


@pytest.mark.parametrize("verb", ["convert", "copy"])
def test_interrupted_nothing_half_done_is_left(verb: str, tmp_path: Path) -> None:
    """Locally, and while a part of an upload is under way."""
    sidestream.blocking.save(
        {"w": torch.zeros(32 << 20)}, tmp_path / "a", options=sidestream.SaveOptions(durability="flush")
    )
    local = started(verb, tmp_path / "a", tmp_path / "b")
    while local.poll() is None and len(list(tmp_path.iterdir())) == 1:
        time.sleep(0.001)  # until it has begun to write
    local.send_signal(signal.SIGINT)
    with serving() as server:
        server.always("part", "stall")
        words = [
            word
            for key in ("key", "secret", "endpoint_url")
            for word in ("--target-option", f"{key}={server.options[key]}")
        ]
        remote = started(verb, tmp_path / "a", f"s3://{server.bucket}/b{'.pt' if verb == 'convert' else ''}", *words)
        try:
            server.wait_for("part")
        finally:
            remote.send_signal(signal.SIGINT)
        _, told = remote.communicate(timeout=300)
        assert remote.returncode == 130, told
        assert "interrupted" in told
        assert (server.objects, server.uploads) == ({}, {})
    _, told = local.communicate(timeout=300)
    assert local.returncode in (0, 130), told  # a fast disk may have been done before
    left = {path.name for path in tmp_path.iterdir()}
    assert left in ({"a"}, {"a", "b"})  # once the commit has been sent it is finished, whoever interrupts
    if "b" in left:
        assert sidestream.blocking.verify(tmp_path / "b").ok


def started(*words: object) -> subprocess.Popen[str]:
    return warm.Popen(
        [*COMMAND, *map(str, words), "--budget-mib", "96"],
        env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
