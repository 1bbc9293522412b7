"""The output of the command line for names from a hostile checkpoint, to pipes and to terminals."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import warm
from test_cli import COMMAND, ENVIRONMENT

import sidestream

HONEST = ("layer[weight]", "a[/b]", "[link=file:///x]y[/link]", "model.[red]hot", "stage:key:0", "größe")
HOSTILE = {
    "\x1b]0;title\x07x": r"\x1b]0;title\x07x",
    "\x1b[31mred": r"\x1b[31mred",
    "\x9b31m": r"\x9b31m",
    "exe\u202egnp": r"exe\u202egnp",
    "lone\udc80": r"lone\udc80",
    "line\nforged: 0 damaged": r"line\nforged: 0 damaged",
    "over\rwritten": r"over\rwritten",
    "zero\u200bwidth": r"zero\u200bwidth",
}
NAMES = {**{name: name for name in HONEST}, **HOSTILE}
ASCII = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}
UTF_8 = {**ENVIRONMENT, "PYTHONUTF8": "1"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``first`` and ``second`` differ in every tensor and value; in ``damaged`` no tensor is as it was."""
    directory = tmp_path_factory.mktemp("names")
    for number, name in enumerate(("first", "second")):
        tensors = {fqn: torch.arange(500.0) + 1000 * number for fqn in NAMES}
        values = {fqn: f"{fqn} {number}" for fqn in NAMES}
        sidestream.blocking.save({"t": tensors, "v": values}, directory / name)
    damaged = directory / "run" / "step-7"
    with sidestream.blocking.Checkpointer(directory / "run") as checkpoints:
        checkpoints.save({"t": {fqn: torch.arange(500.0) for fqn in NAMES}}, step=7)
    for path in damaged.glob("*.distcp"):
        path.write_bytes(path.read_bytes().replace(torch.arange(100.0, 300.0).numpy().tobytes(), bytes(800)))
    return directory


def printed(*words: object, code: int = 0, environment: dict[str, str] = ASCII) -> str:
    """Return both output streams, read from pipes, after checking that they contain no control character."""
    done = warm.run(
        [*COMMAND, *map(str, words)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    text = done.stdout.decode(environment.get("PYTHONIOENCODING", "utf-8"))
    assert done.returncode == code, text
    assert "Traceback" not in text
    assert all(line.isprintable() for line in text.split("\n")), text
    return text


def on_a_terminal(*words: object, code: int = 0) -> str:
    ours, theirs = pty.openpty()
    environment = {**UTF_8, "TERM": "xterm-256color", "COLUMNS": "300"}
    child = warm.Popen([*COMMAND, *map(str, words)], env=environment, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert child.wait(300) == code, shown
    return shown.decode()


def test_names_are_shown_in_full_and_escaped(places: Path) -> None:
    text = printed("info", places / "first", environment=UTF_8)
    lines = {line.split("  ")[0] for line in text.splitlines()}
    assert {f"{kind}.{shown}" for shown in NAMES.values() for kind in "tv"} <= lines
    assert len(text.splitlines()) == 2 * len(NAMES) + 3  # a heading, a sum, and when it was saved
    assert r"t.gr\xf6\xdfe" in printed("info", places / "first")


def test_names_on_a_terminal(places: Path) -> None:
    text = on_a_terminal("diff", places / "first", places / "second", code=1)
    assert all(f"t.{shown}" in text for shown in NAMES.values())
    heading, *rows = text.replace("\r\n", "\n").strip().split("\n")
    assert not heading.isprintable()  # it is bold: this is what a terminal gets
    assert len(rows) == 2 * len(NAMES)
    assert all(row.isprintable() for row in rows), rows


def test_diff_verify_ls_and_prune_of_hostile_names(places: Path) -> None:
    text = printed("diff", places / "first", places / "second", code=1)
    assert all(f"t.{shown}".encode("ascii", "backslashreplace").decode() in text for shown in NAMES.values())
    told = printed("verify", places / "run" / "step-7", code=1)
    assert [line.startswith("damaged: t.") for line in told.splitlines()] == [True] * len(NAMES) + [False]
    assert r"damaged: t.line\nforged: 0 damaged: " in told
    (places / "run" / "step-8").mkdir()
    (places / "run" / "step-8" / ".metadata").write_bytes(b"\x1b]0;title\x07" * 9)
    printed("ls", places / "run")
    printed("prune", places / "run", "--keep-last", "1", "--dry-run")


def test_converting_and_copying_hostile_names(places: Path, tmp_path: Path) -> None:
    printed("convert", places / "first", tmp_path / "all.pt")
    told = printed("convert", places / "first", tmp_path / "some.safetensors", code=2)
    assert told.strip().endswith("leave them out with --select")
    assert printed("diff", places / "first", tmp_path / "all.pt").strip() == "no differences"
    told = printed("copy", places / "run" / "step-7", tmp_path / "copied", code=2)
    assert told.startswith("CorruptCheckpointError: ")
    for words in (("info", tmp_path / "\x1b[31m\udc80"), ("info", places / "first", "\x1b[31m*\n")):
        assert r"\x1b[31m" in printed(*words, code=2)


def test_json_holds_the_names_as_they_are(places: Path) -> None:
    found: list[dict[str, Any]] = json.loads(printed("info", places / "first", "t.*", "--json"))["entries"]
    assert [one["name"] for one in found] == [f"t.{name}" for name in NAMES]
    report = json.loads(printed("verify", places / "run" / "step-7", "--json", code=1))
    assert {one["fqn"] for one in report["damaged"]} == {f"t.{name}" for name in NAMES}
    error = json.loads(printed("copy", places / "run" / "step-7", places / "no", "--json", code=2))
    assert error["error"] == "CorruptCheckpointError"


def test_json_has_no_number_that_json_lacks(tmp_path: Path) -> None:
    for name, number in (("a", 1.0), ("b", float("nan"))):
        sidestream.blocking.save({"w": torch.tensor([number])}, tmp_path / name)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(printed("diff", tmp_path / "a", tmp_path / "b", "--json", code=1), parse_constant=refuse)
    assert found[0]["largest"] == "inf"


def test_advice_in_brackets_is_shown() -> None:
    missing = (
        "from importlib import metadata as m\nreal = m.version\ndef version(name):\n"
        "    if name == 'obstore': raise m.PackageNotFoundError(name)\n    return real(name)\nm.version = version\n"
    )
    command = [*COMMAND[:-1], missing + COMMAND[-1], "doctor"]
    done = warm.run(command, env=UTF_8, capture_output=True, text=True, timeout=300, check=True)
    assert "pip install 'sidestream[cloud" in done.stdout


async def test_no_line_of_a_log_is_forged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning for a damaged step that is skipped names a tensor; notes and reports name it too."""
    fqn = "line\nERROR forged\x1b[31m"
    async with sidestream.Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            await checkpoints.save({fqn: torch.arange(500.0)}, step=step)
    for path in (tmp_path / "step-2").glob("*.distcp"):
        path.write_bytes(path.read_bytes().replace(torch.arange(100.0, 300.0).numpy().tobytes(), bytes(800)))
    with caplog.at_level(logging.DEBUG, "sidestream"):
        async with sidestream.Checkpointer(tmp_path) as checkpoints:
            assert await checkpoints.restore({fqn: torch.zeros(500)}, fallback="older") == 1
        with pytest.raises(sidestream.errors.CorruptCheckpointError) as caught:
            await sidestream.load({fqn: torch.zeros(500)}, tmp_path / "step-2")
    assert r"already: line\nERROR forged\x1b[31m" in caught.value.__notes__[0]
    report = await sidestream.verify(tmp_path / "step-2")
    assert r"line\nERROR forged\x1b[31m: its bytes" in report.damaged[0].message
    lines = [record.getMessage() for record in caplog.records]
    assert any(r"line\nERROR forged\x1b[31m" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_errors_escape_names_and_keep_their_lists(tmp_path: Path) -> None:
    sidestream.blocking.save({"w": torch.zeros(2)}, tmp_path / "a")
    with pytest.raises(sidestream.errors.MissingKeysError) as caught:
        sidestream.blocking.load({"x\n  y: in the target": torch.zeros(1), "\x1b[0m": torch.zeros(1)}, tmp_path / "a")
    first, *lines = str(caught.value).split("\n")
    assert first.endswith("(nothing was changed):")
    assert [line.startswith("  ") for line in lines] == [True, True, True]  # the last one is the way out
    assert r"x\n  y: in the target" in lines[0]
    assert lines[1].startswith(r"  \x1b[0m")


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("list:\n  one\n\ttwo\nthree", "list:\n  one\n\ttwo\\nthree"),
        ("tab\there", r"tab\there"),
        ("\u2028\x85\ud800", r"\u2028\x85\ud800"),
        ("größe 重み", "größe 重み"),
    ],
)
def test_messages(raw: str, shown: str) -> None:
    for kind in (
        sidestream.errors.CorruptCheckpointError,
        sidestream.errors.MissingKeysError,
        sidestream.errors.CheckpointNotFoundError,
    ):
        assert str(kind(raw)) == shown
        assert str(kind(shown)) == shown
        assert kind(raw).args == (raw,)


def test_an_error_that_nobody_expected_is_escaped_too(capsys: pytest.CaptureFixture[str]) -> None:
    """An unexpected error is printed with its traceback and ends with the exit code of an error."""
    from sidestream_cli.frame import verb

    @verb
    def broken() -> int:
        raise ValueError("\x1b[31mred\nforged")

    with pytest.raises(typer.Exit) as caught:
        broken()
    assert caught.value.exit_code == 2
    *traceback, message = capsys.readouterr().err.splitlines()
    assert message == r"ValueError: \x1b[31mred\nforged"
    assert "in broken" in " ".join(traceback)
