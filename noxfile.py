"""Everything that is run on this repository: ``nox -l`` lists it.

Sessions install with ``-c constraints.txt``, which pins torch and every tool. Tests, types and the demo run on each
Python of pyproject's classifiers that this machine has; the ones it lacks are skipped, also where ``CI`` is set, but
where it has none of them the sessions fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nox

# Sessions install without bytecode (see _install). With this variable, which some container images set, every process
# of a session would compile what it imports of torch again, which takes longer than the import itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

CONSTRAINTS = ("-c", "constraints.txt")
PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = [
    classifier.rpartition(" ")[-1]
    for classifier in PYPROJECT["project"]["classifiers"]
    if classifier.startswith("Programming Language :: Python :: 3.")
]


def _answers(python: str) -> bool:
    """Whether an interpreter of that version runs here (a shim of a version manager may exist and still refuse)."""
    if python == f"{sys.version_info.major}.{sys.version_info.minor}":
        return True
    path = shutil.which(f"python{python}")
    return path is not None and subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0


AZURITE = "azurite@3.37.0"
SPREAD = ("-n2", "--dist=loadfile", "--no-loadscope-reorder")
"""Two processes that share the files of a session, in the order that tests/conftest.py gives them."""

SHORT = ("-m", "not long")
LONG = ("-m", "long or hypothesis", "--hypothesis-profile=random")
ELSEWHERE = ("--ignore=tests/crash/campaign", "--ignore=tests/ranks")
"""Tests that `campaign` and `ranks` run."""

FOUND = [python for python in PYTHONS if _answers(python)]
ONE = FOUND[0] if FOUND else PYTHONS[0]
"""For sessions that need only one interpreter."""

nox.options.default_venv_backend = "virtualenv"
nox.options.download_python = "never"
nox.options.error_on_external_run = True
nox.options.error_on_missing_interpreters = not FOUND
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["tests", "writers", "stores", "lint", "types", "docs"]


def _install(session: nox.Session, *what: str, groups: tuple[str, ...] = (), silent: bool = True) -> None:
    tools = nox.project.dependency_groups(PYPROJECT, *groups) if groups else ()
    # Compiling all of torch beforehand takes three times as long as unpacking it; what is imported is compiled then.
    session.install("--no-compile", *CONSTRAINTS, *what, *tools, silent=silent)


@nox.session(python=ONE)
def demo(session: nox.Session) -> None:
    """Train, kill, resume and compare with stock DCP (about two and a half minutes)."""
    made = session.virtualenv
    if made.is_sandboxed and not any(Path(made.location).glob("lib/python*/site-packages/torch")):
        session.log(
            "Now torch and what else the demo needs are installed: 0.25 GB to download and 1 GB on disk (5 GB if pip "
            "finds only the CUDA build of torch). This takes half a minute to a minute beside the download, once."
        )
    _install(session, ".", groups=("demo",), silent=not sys.stdout.isatty())  # on a terminal pip shows its progress
    session.run("python", "examples/train_live.py", *session.posargs)


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Run the tests against the built package; arguments after ``--`` go to pytest."""
    _install(session, ".", groups=("tests",))
    session.install("--no-deps", "-c", "constraints.txt", "lpips", "silero-vad")  # for the weights that they bring
    session.run("python", "-m", "pytest", *SPREAD, *SHORT, *ELSEWHERE, *session.posargs)


@nox.session(python=ONE)
def long(session: nox.Session) -> None:
    """Run the long forms that `tests`, `ranks` and `writers` leave out, and look for new examples of those tests that
    make their own; arguments after ``--`` go to pytest."""
    _install(session, ".", groups=("tests",))
    session.run("python", "-m", "pytest", *SPREAD, *LONG, *(session.posargs or ELSEWHERE[:1]))


@nox.session(python=ONE)
def ranks(session: nox.Session) -> None:
    """Run tests/ranks: groups of real processes that save and load together, and are killed at it.

    The log says how long the survivors took to know (``-rP``)."""
    _install(session, ".", groups=("tests",))
    session.run("python", "-m", "pytest", *SPREAD, *SHORT, *(session.posargs or ["-rP", "tests/ranks"]))


ALIKE = (
    # They save nothing, or only what they read.
    "runs/test_retention.py",
    "runs/test_pruning.py::test_without_the_right_to_write_a_reader_reads_without_a_lease",
    "runs/test_restoring.py::test_metadata_is_checked_before_anything_is_written",
    "dcp/test_dcp_calls.py::test_errors_travel_between_ranks",
    "test_saving.py::test_overlapping_views_of_any_dtypes",
    "test_windows.py::test_any_run_of_row_major_bytes_of_any_view",
    # Other processes save, and they do not get the option; or the test says who writes.
    "runs/test_watching.py::test_a_server_follows_a_trainer_that_keeps_one_step",
    "runs/test_watching.py::test_a_watch_sees_the_last_step_of_another_process",
    "runs/test_wrong_places.py::test_a_checkpoint_is_not_a_run",
    "runs/test_wrong_places.py::test_a_run_is_not_a_checkpoint",
    "test_blocking.py::test_an_error_of_the_callers_code_is_in_no_reference_cycle",
    "test_blocking.py::test_the_interpreter_ends_by_itself",
    "test_windows.py::test_streaming_needs_little_memory_whatever_the_state_has",
    "test_windows.py::test_what_is_sent_in_one_request_passes_through_it_too",
    # Random states on one file system, random tensors on the other one.
    "test_roundtrip.py::test_random_nested_states[disk]",
    "test_roundtrip.py::test_random_tensors_in_place_and_by_rows[tmpfs]",
)
"""Tests that show the same, whoever writes."""


@nox.session(python=ONE)
def writers(session: nox.Session) -> None:
    """Run the tests of saving once more, with a writer process where they do not say who writes.

    ``-- --everything`` runs also the tests that no writer process changes."""
    _install(session, ".", groups=("tests",))
    arguments = [one for one in session.posargs if one != "--everything"]
    left_out = () if len(arguments) < len(session.posargs) else [f"--deselect=tests/{one}" for one in ALIKE]
    files = [f"tests/test_{name}.py" for name in ("saving", "roundtrip", "windows", "blocking")]
    where = arguments or ["tests/runs", "tests/dcp/test_dcp_calls.py", *files]
    session.run("python", "-m", "pytest", *SPREAD, *SHORT, *left_out, "--writer=process", *where)


@nox.session(python=ONE)
def perturbed(session: nox.Session) -> None:
    """Run the tests with random pauses in system calls, to shake out orders that a quiet machine never shows."""
    _install(session, ".", groups=("tests",))
    rows = ("--ignore=tests/crash/campaign", "--ignore=tests/stores")
    session.run(
        "python", "-m", "pytest", *SPREAD, *(session.posargs or rows),
        env={"PYTHONPATH": str(Path("tests", "perturbed").absolute()), "SIDESTREAM_PAUSE_S": "0.05"},
    )  # fmt: skip


@nox.session(python=ONE)
def campaign(session: nox.Session) -> None:
    """Break it in every way and count (``-- --long`` takes hours, ``-- --seed N`` replays). All of it needs root."""
    _install(session, ".", groups=("tests",))
    where = () if any("tests/" in argument for argument in session.posargs) else ("tests/crash/campaign",)
    patience = ("-o", "faulthandler_timeout=0") if "--long" in session.posargs else ()  # a row takes up to hours
    session.run("python", "-m", "pytest", "-n2", "--dist=worksteal", *patience, *where, *session.posargs)


TORCH_VERSIONS = ("2.11.0", "2.12.1", "2.14.1", "2.15.0")
"""Those around the one in constraints.txt, which the other sessions run with."""


@nox.session(python=[*PYTHONS, "3.14"])
@nox.parametrize("torch", TORCH_VERSIONS)
def torch_versions(session: nox.Session, torch: str) -> None:
    """Run round trips and the tests beside stock DCP with other releases of torch.

    Each takes 5 GB where pip finds no CPU build. ``nox -s "torch_versions-3.11(torch='2.15.0')"`` runs one of them.
    """
    tools = nox.project.dependency_groups(PYPROJECT, "tests")
    # What constraints.txt says of torch and of what it brings along is for another release.
    session.install("--no-compile", f"torch=={torch}", ".", *tools, silent=True)
    session.run("python", "-m", "pytest", *(session.posargs or INTEROP))


INTEROP = ("tests/test_interop_dcp.py", "tests/test_roundtrip.py", "tests/dcp")


@nox.session(python=ONE)
def dcp_suite(session: nox.Session) -> None:
    """Run PyTorch's own tests of DCP with DCP's storage, then with sidestream's; arguments after ``--`` go to pytest.

    ``SIDESTREAM_TORCH_TESTS`` is the directory ``test/distributed/checkpoint`` of PyTorch's sources, of the release in
    constraints.txt. They are no part of this repository. A test that does not pass with DCP's own storage (it needs
    GPUs, or another release) is left out of the other two runs.
    """
    folder = os.environ.get("SIDESTREAM_TORCH_TESTS")
    if not folder:
        session.skip("SIDESTREAM_TORCH_TESTS names no directory with PyTorch's tests")
    assert folder is not None
    _install(session, ".", groups=("tests",))
    session.install("expecttest", "psutil", silent=True)
    stock = Path(session.create_tmp(), "passed_with_stock.txt").absolute()
    _run_dcp_tests(session, folder, "", f"--suite-passed={stock}")
    failed = []
    for what, differing in DCP_DIFFERENCES.items():
        options = [f"--suite-chosen={stock}", *(f"--suite-differs={test}" for test in differing)]
        try:
            _run_dcp_tests(session, folder, what, *options)
        except nox.command.CommandFailed:
            failed.append(what)
    if failed:
        session.error(f"other results than with DCP's own storage: {', '.join(failed)}")


def _run_dcp_tests(session: nox.Session, folder: str, what: str, *options: str) -> None:
    """``what`` is put in the place of DCP's own; with nothing there, tests may fail."""
    session.run(
        "python", "-m", "pytest", "-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-W", "ignore",
        "-p", "suite_outcomes", "-q", "--tb=short", "--continue-on-collection-errors", *options,
        *(session.posargs or [str(path) for path in dcp_tests(Path(folder))]),
        env={
            "PYTHONPATH": str(Path("tests", "dcp", "torch_suite").absolute()),
            "SIDESTREAM_TORCH_SUITE": what,
            "OMP_NUM_THREADS": "1",
        },
        success_codes=[0] if what else [0, 1],
    )  # fmt: skip


_ROT13 = "test_file_system_checkpoint_cpu.py::TestDistributedStateDictSaveLoadRot13"
DCP_DIFFERENCES = {
    "storage": (_ROT13,),
    "verbs": (
        _ROT13,
        "e2e/test_e2e_save_and_load.py::TestE2ESaveAndLoad::test_stateful_and_non_stateful_loads",
        "test_compatibility.py::TestDCPCompatbility::test_storage_meta",
    ),
}
"""Names of tests that pass with DCP's own storage and fail with sidestream's. docs/from_dcp.md gives the reasons."""


def dcp_tests(folder: Path) -> list[Path]:
    """Of PyTorch's files those that save and load, and those about planning. Many of their tests need GPUs."""
    storing = ("file_system_checkpoint_cpu", "checkpoint", "save_load_api", "compatibility", "format_utils")
    elsewhere = ("fsspec", "hf_safetensor_e2e")
    other = ("planner", "dtensor_checkpoint", "utils", "nested_dict", "traverse", "dedup_tensors")
    last = "async_process_executor"  # leaves a process group behind, with which tests of planners fail
    chosen = ("e2e/test_e2e_save_and_load.py", *(f"test_{name}.py" for name in (*storing, *elsewhere, *other, last)))
    return [folder / name for name in chosen if (folder / name).exists()]


@nox.session(python=ONE)
def stores(session: nox.Session) -> None:
    """Run tests/stores against object stores that are started here. Arguments after ``--`` go to pytest and replace the
    list of tests: ``-- tests/stores -m long`` runs the long forms."""
    _install(session, ".[cloud]", groups=("tests", "stores"))
    session.run(
        "python", "-m", "pytest", *(session.posargs or ["-n2", "--dist=worksteal", *SHORT, "tests/stores"]),
        env={"SIDESTREAM_AZURITE": str(_azurite(session))},
    )  # fmt: skip


def _azurite(session: nox.Session) -> Path:
    """A directory of its own for the one server that npm brings. Without npm its tests say that it is missing."""
    folder = Path(".nox", "azurite").absolute()
    if shutil.which("npm") is None:
        session.warn("npm is not on the PATH: azurite is not installed")
    elif not (folder / "node_modules" / "azurite").is_dir():
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        session.run("npm", "install", *quiet, "--prefix", str(folder), AZURITE, external=True, silent=True)
    return folder


INTEGRATIONS = ("accelerate", "lightning", "ray", "torchtitan", "transformers")
"""The modules of sidestream.integrations. Each has an extra of its name, tests/integrations/test_NAME*.py, and a page
docs/integrations/NAME.md, whose blocks run, too. `ray` and `torchtitan` run before a release and not in CI, and their
pages say when they ran last."""

OWN_VERSIONS = {"torchtitan": ("torch==2.13.0", "triton")}
"""Frameworks that do not go with constraints.txt, and what they get in its place. TorchTitan needs an older fsspec; it
imports triton, which the CPU build of torch does not bring."""


OWN_TESTS: dict[str, tuple[str, ...]] = {
    "accelerate": (
        "test_state_checkpointing.py",
        "test_accelerator.py",
        "-k=CheckpointTest or save_load_model or save_model_with_stateful_dataloader",
    ),
    "lightning": (
        "tests_pytorch/plugins/test_checkpoint_io_plugin.py",
        "tests_pytorch/plugins/test_async_checkpoint.py",
        "tests_pytorch/trainer/connectors/test_checkpoint_connector.py",
        "tests_pytorch/checkpointing/test_trainer_checkpoint.py",
        "tests_pytorch/checkpointing/test_model_checkpoint.py",
    ),
    "torchtitan": ("unit_tests/test_checkpoint.py",),
    "transformers": (
        "trainer/test_trainer_checkpointing.py",
        "trainer/test_trainer_resume.py",
        "trainer/test_trainer_callback.py::StatefulCallbackTest",
    ),
}
"""Which of a framework's own tests save and load. ``SIDESTREAM_LIGHTNING_TESTS`` and so on is their directory:
``tests`` in the sources of the release that is installed. They are not in this repository."""

OWN_TOOLS = {"accelerate": ("parameterized",), "lightning": ("cloudpickle", "jsonargparse")}
"""What a framework's own tests import beside pytest."""


def _run_own_tests(session: nox.Session, name: str, folder: Path) -> None:
    """Run a framework's own tests as they are, and those that passed once more with sidestream in its place. The page
    of the framework says which do not apply, and why; a person compares them."""
    if name in OWN_TOOLS:
        session.install("-c", "constraints.txt", *OWN_TOOLS[name], silent=True)
    stock = Path(session.create_tmp(), "passed_with_stock.txt").absolute()
    plugins = (
        str(Path("tests", "dcp", "torch_suite").absolute()),
        str(Path("tests", "integrations", "own").absolute()),
    )
    for options in ([f"--suite-passed={stock}"], ["-p", f"{name}_substitute", f"--suite-chosen={stock}"]):
        with session.chdir(folder):
            session.run(
                "python", "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider", "-W", "ignore",
                "-p", "suite_outcomes", "-q", "--tb=short", *options, *OWN_TESTS[name],
                env={"PYTHONPATH": os.pathsep.join([*plugins, "."]), "OMP_NUM_THREADS": "1"},
                success_codes=[0, 1],
            )  # fmt: skip


def _integration(name: str) -> None:
    """Define the session of one framework, which has an environment of its own."""

    @nox.session(name=f"integrations-{name}", python=ONE)
    def run(session: nox.Session) -> None:
        if name in OWN_VERSIONS:
            tools = nox.project.dependency_groups(PYPROJECT, "integrations")
            session.install("--no-compile", *OWN_VERSIONS[name], f".[{name}]", *tools, silent=True)
        else:
            _install(session, f".[{name}]", groups=("integrations",))
        files = [str(path) for path in sorted(Path("tests", "integrations").glob(f"test_{name}*.py"))]
        page = [f"tests/test_docs.py::test_page_runs[{name}.md]"]
        # Ray starts its workers again for each of 20 kills: 20 minutes on a busy machine.
        patience = ("-o", "faulthandler_timeout=3600") if name == "ray" else ()
        session.run("python", "-m", "pytest", *patience, *(session.posargs or [*files, *page]))
        folder = os.environ.get(f"SIDESTREAM_{name.upper()}_TESTS")
        if folder and name in OWN_TESTS:
            _run_own_tests(session, name, Path(folder))

    run.__doc__ = f"Run the tests of sidestream.integrations.{name}, long forms included, and the blocks of its page."


for _name in INTEGRATIONS:
    _integration(_name)


CUDA_TORCH = os.environ.get("SIDESTREAM_CUDA_TORCH", "2.13.0")
"""The release of torch for `cuda_sim`. Its build on the package index has to be one for CUDA 13."""

CUDA_SIM = Path("tests", "cudasim")
CUDA_TESTS = ("tests/test_streams.py", "tests/test_mapped.py")
"""Other files with tests that need a CUDA device, which the other sessions skip."""


@nox.session(python=ONE)
@nox.parametrize("torch", [CUDA_TORCH], ids=[CUDA_TORCH])
def cuda_sim(session: nox.Session, torch: str) -> None:
    """Run what needs a CUDA device on a simulated runtime, under several schedules: ``-- --seeds 10``, default 3.

    It needs Linux on x86-64, g++ 12, 8 GB of disk and 12 GB of memory. Other arguments after ``--`` go to pytest and
    replace the list of tests. ``SIDESTREAM_CUDA_TORCH=2.11.0`` takes another release, in an environment of its own.
    """
    options = argparse.ArgumentParser(prog="nox -s cuda_sim --", add_help=False)
    options.add_argument("--seeds", type=int, default=3)
    chosen, arguments = options.parse_known_args(session.posargs)
    # The CPU build that constraints.txt may find has the same version and a local part, which `===` excludes.
    session.install("--no-compile", f"torch==={torch}", silent=True)
    packages = ("numpy", "hypothesis", "pytest", "pytest-asyncio", "pytest-xdist")
    session.install("--no-compile", *packages, "aiofiles", "anyio", "fsspec", "isal", "typer", "rich", silent=True)
    version = str(session.run("python", "-c", "import torch; print(torch.version.cuda)", silent=True)).strip()
    if not version.startswith("13."):
        session.error(f"torch {torch} is a build for CUDA {version}: one for CUDA 13 is needed")
    session.install(f"nvidia-cuda-crt=={version}.*", silent=True)  # headers that the packages of torch leave out
    # tests/gpu runs by itself, because it takes the options of its own pytest.ini then.
    runs = (arguments,) if arguments else ([str(CUDA_SIM)], ["tests/gpu"], list(CUDA_TESTS))
    simulated = ("bash", str(CUDA_SIM / "run.sh"), "python")
    for seed in range(1, chosen.seeds + 1):
        for run in runs:
            session.run(
                *simulated, "-m", "pytest", "-q", "-p", "no:cacheprovider", *run,
                env={"CUDASIM_SEED": str(seed), **SCHEDULES[(seed - 1) % len(SCHEDULES)]}, external=True,
            )  # fmt: skip
    if not arguments:
        session.run(*simulated, "benchmarks/gpu.py", "--rehearsal", external=True)


SCHEDULES: tuple[dict[str, str], ...] = (
    {"CUDASIM_DELAY_US": "20000", "CUDASIM_DELAY_CHANCE": "0.7"},  # late
    {},  # as it is by default
    {"CUDASIM_DELAY_US": "0", "CUDASIM_ENGINES": "1"},  # at once, one copy at a time in each direction
    {"CUDASIM_SLICE_KB": "64", "CUDASIM_DELAY_US": "3000"},  # finely interleaved
)
"""How the simulator orders work, beside the seed: successive seeds take them in turn."""


@nox.session(python=ONE)
def lint(session: nox.Session) -> None:
    """Check style and format (``nox -s lint -- --fix`` repairs what it can)."""
    _install(session, groups=("lint",))
    fix = "--fix" in session.posargs
    session.run("ruff", "check", *(["--fix"] if fix else []), ".")
    session.run("ruff", "format", *([] if fix else ["--check"]), ".")


@nox.session(python=ONE)
def types(session: nox.Session) -> None:
    """Run mypy in strict mode over the package."""
    _install(session, ".", groups=("types",))
    session.run("mypy", *session.posargs)


@nox.session(python=ONE)
def docs(session: nox.Session) -> None:
    """Build the documentation, warnings are errors (``-- serve`` shows it). Reads the sources, needs no torch."""
    _install(session, groups=("docs",))
    session.run(
        "mkdocs",
        *(session.posargs or ["build", "--strict", "--quiet"]),
        env={"NO_MKDOCS_2_WARNING": "1"},  # an advertisement of the theme, not a warning about these pages
    )


@nox.session(python=ONE)
def bench(session: nox.Session) -> None:
    """Run every script of benchmarks/, or those named after ``--``."""
    scripts = session.posargs or sorted(str(path) for path in Path("benchmarks").glob("[!_]*.py"))
    if not scripts:
        session.skip("benchmarks/ is empty")
    _install(session, ".", groups=("bench",))
    for script in scripts:
        session.run("python", script)


@nox.session(python=ONE)
def wheel(session: nox.Session) -> None:
    """Build an sdist, a wheel from it, and run a smoke test with the wheel alone in a bare environment."""
    folder = session.create_tmp()
    session.install("-c", "constraints.txt", "build", silent=True)
    session.run("python", "-m", "build", "--outdir", folder, silent=True)
    session.install("--no-compile", *CONSTRAINTS, str(next(Path(folder).glob("*.whl"))), silent=True)
    session.chdir(folder)  # so that the package is imported from the environment
    session.run("python", "-W", "error:::sidestream", "-c", SMOKE)  # torch itself warns without numpy


SMOKE = """
import asyncio, sys, torch, sidestream
assert "site-packages" in sidestream.__file__, sidestream.__file__
state, target = {"w": torch.arange(9.0), "step": 3}, {"w": torch.zeros(9), "step": 0}
async def main():
    async with sidestream.Checkpointer("run") as checkpoints:
        info = await checkpoints.save(state, step=3)
        assert await checkpoints.restore(target) == 3
    assert torch.equal(target["w"], state["w"]) and target["step"] == 3
    assert (await sidestream.verify(info.url)).ok
    print(sidestream.__version__, info)
asyncio.run(main())
"""
