"""The command line as a user runs it: processes, exit codes, and what they print."""

from __future__ import annotations

import json
import mmap
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
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
    assert "a run with 3 steps" in sidestream_("verify", tmp_path, code=2)


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
    shown = sidestream_("prune", tmp_path, "--keep-last", 1, "--keep-best", "loss", "--dry-run")
    assert "best by loss: step 2\nwould delete step-1" in shown
    assert len(json.loads(sidestream_("ls", tmp_path, "--json"))) == 3


def _extra(advice: str) -> str:
    return advice.partition("sidestream[")[2].partition("]")[0]


def test_the_advice_of_doctor_is_true(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each piece of advice, on a machine that needs all of them, is an option, an extra or a command that exists."""
    monkeypatch.setattr(machine, "find_spec", lambda package: None)
    monkeypatch.setattr(machine, "CRC_ENGINE", "zlib")
    monkeypatch.setattr("resource.getrlimit", lambda which: (1 << 20, 1 << 20))
    pages = made(tmp_path / "sys", {"kernel/mm/transparent_hugepage/enabled": "always madvise [never]"})
    made(pages, {"kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force"})
    monkeypatch.setattr(machine, "_SYSFS", pages)
    found = {one.what: one for one in machine.machine(str(tmp_path))}
    assert found["sidestream"].here == sidestream.__version__
    advice = {one.advice for one in found.values() if one.advice}
    extras = {_extra(text) for text in advice if "sidestream[" in text}
    assert extras == {"cloud", "zstd", "digest", "signing", "watch"}
    assert extras <= set(metadata.metadata("sidestream").get_all("Provides-Extra", []))
    checked = {text for text in advice if "sidestream[" in text}
    for text in advice - checked:
        if "isal" in text:
            assert metadata.version("isal")
        elif "SaveOptions(streaming=True)" in text:
            options = eval("SaveOptions(streaming=True)", {"SaveOptions": sidestream.SaveOptions})  # noqa: S307
            sidestream.blocking.save({"w": torch.ones(3)}, tmp_path / "streamed", options=options)
            assert sidestream.blocking.verify(tmp_path / "streamed").ok
        elif "ulimit -l" in text:
            subprocess.run(["bash", "-c", "ulimit -l"], check=True, stdout=subprocess.DEVNULL)
        elif text.startswith("echo "):
            value, path = text.removeprefix("echo ").partition(":")[0].split(" > ")
            assert value in Path(path).read_text().split()
        elif "sidestream bench" in text:
            sidestream_("bench", "--help")
        else:
            assert text.startswith(("host memory is copied", "buffered writes are used")), "advice that nobody checks"


class Cuda:
    """The CUDA of a machine, in place of ``torch.cuda``: a device for each code that registering returns on it."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.current, self.calls = codes, -1, list[tuple[int, str]]()

    def is_available(self) -> bool:
        return bool(self.codes)

    def device_count(self) -> int:
        return len(self.codes)

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1A + index, pci_device_id=0)

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


def test_doctor_on_a_machine_with_nodes_and_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sysfs = made(tmp_path / "sys", {f"devices/system/node/node{node}/cpulist": "0" for node in (0, 1)})
    made(sysfs, {f"bus/pci/devices/0000:{bus}:00.0/numa_node": node for bus, node in (("1a", "1"), ("1b", "-1"))})
    made(sysfs, {"kernel/mm/transparent_hugepage/enabled": "always [madvise] never"})
    cuda = Cuda(0, 0, 2)
    monkeypatch.setattr(machine, "_SYSFS", sysfs)
    monkeypatch.setattr(torch, "cuda", cuda)
    found = {one.what: one for one in machine.machine(str(tmp_path))}
    assert found["NUMA nodes"].here == "2"
    assert (found["huge pages"].here, found["huge pages"].advice) == ("madvise", "")
    assert (found["huge pages, shared"].here, found["huge pages, shared"].advice) == ("unknown", "")
    assert (found["cuda:0"].here, found["cuda:0"].advice) == ("NUMA node 1, host memory can be registered", "")
    assert found["cuda:1"].here == "NUMA node unknown, host memory can be registered"
    assert "with numactl" in found["cuda:1"].advice
    assert found["cuda:2"].here == "NUMA node unknown, host memory cannot be registered (out of memory)"
    assert "memory limit of the container" in found["cuda:2"].advice
    assert cuda.calls == [(0, "register"), (0, "unregister"), (1, "register"), (1, "unregister"), (2, "register")]


def test_doctor_on_a_machine_with_one_node_and_without_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = Cuda()
    monkeypatch.setattr(machine, "_SYSFS", made(tmp_path / "sys", {"devices/system/node/node0/cpulist": "0"}))
    monkeypatch.setattr(torch, "cuda", cuda)
    found = {one.what: one for one in machine.machine(str(tmp_path))}
    assert found["NUMA nodes"].here == "1"
    assert not any(what.startswith("cuda") for what in found)
    assert cuda.calls == []


def test_ls_and_info(run: Path) -> None:
    steps = json.loads(sidestream_("ls", run, "--json"))
    assert [(one["step"], one["name"], one["tensors"]) for one in steps] == [(1, "step-1", 2), (2, "step-2", 2)]
    shown = sidestream_("info", run / "step-1")
    for word in ("model.w", "float32", "20x30", "2.3 KiB", "__0_1.distcp", "2 tensors", "1 values"):
        assert word in shown


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
    assert {"torch", "checksums", "direct I/O", "locked memory"} <= {one["what"] for one in found}
    assert {"NUMA nodes", "huge pages", "huge pages, shared"} <= {one["what"] for one in found}
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
