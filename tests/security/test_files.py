"""What the files are: private until they are published, exclusive, and without anything secret in them."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import sidestream
from sidestream import errors
from sidestream._runtime.threads import Deadline, Stop, time_limit
from sidestream._storage import Attempt, LocalStore
from sidestream._storage.bodies import BytesBody
from sidestream.errors import redacted

CANARY = "c4n4ry"


@pytest.mark.parametrize(("umask", "directory", "file"), [(0o077, 0o700, 0o600), (0o022, 0o755, 0o644)])
async def test_published_with_the_umask(umask: int, directory: int, file: int, tmp_path: Path) -> None:
    old = os.umask(umask)
    try:
        await sidestream.save({"w": torch.ones(4), "s": 1}, tmp_path / "run" / "c")
        async with sidestream.Checkpointer(tmp_path / "steps") as checkpoints:
            await checkpoints.save({"w": torch.ones(4), "s": 1}, step=1)
    finally:
        os.umask(old)
    for path in ("run", "run/c", "steps", "steps/step-1"):
        assert stat.S_IMODE((tmp_path / path).stat().st_mode) == directory, path
    for path in (*(tmp_path / "run" / "c").iterdir(), *(tmp_path / "steps" / "step-1").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == file, path


class Looking(BytesBody):
    """A body that looks at the attempt while it is written."""

    directory: Path
    modes: list[int]

    def take(self, stop: Stop) -> memoryview:
        self.modes.append(stat.S_IMODE(self.directory.stat().st_mode))
        return memoryview(self.content)

    @property
    def parts(self) -> Any:
        return (self,)


async def test_private_while_it_is_written(tmp_path: Path) -> None:
    old = os.umask(0)
    body = Looking(b"content")
    attempt = Attempt("c", "directory", "a" * 32, "flush")
    transaction = LocalStore(tmp_path).begin(attempt)
    object.__setattr__(body, "directory", tmp_path / attempt.name)
    object.__setattr__(body, "modes", modes := [])
    try:
        with time_limit(Deadline.after(60)):
            transaction.write([("f", body)])
        transaction._make_visible()
    finally:
        os.umask(old)
    assert modes == [0o700]
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o777


async def test_a_name_that_is_taken_is_never_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "link").symlink_to(tmp_path / "precious")
    os.link(tmp_path / "precious", tmp_path / "d" / "hard")
    for name in ("link", "hard"):
        with pytest.raises(errors.CheckpointExistsError), time_limit(Deadline.after(60)):
            await LocalStore(tmp_path).put(f"d/{name}", b"other", durability="flush")
    assert (tmp_path / "precious").read_bytes() == b"precious"


async def test_files_do_not_say_where_they_are_or_who_wrote_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Stock DCP puts the whole URL into ``.metadata``."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    caplog.set_level(logging.DEBUG)
    await sidestream.save({"w": torch.ones(4), "s": "value"}, tmp_path / "a")
    for path in (tmp_path / "a").iterdir():
        raw = path.read_bytes()
        assert CANARY.encode() not in raw
        assert str(tmp_path).encode() not in raw
    assert CANARY not in caplog.text
    assert CANARY not in Path("/proc/self/cmdline").read_text()
    assert CANARY not in Path("/proc/self/comm").read_text()


SECRET_URLS = [
    f"nosuch://user:{CANARY}@host/bucket/c",
    f"nosuch://host/bucket/c?X-Amz-Signature={CANARY}",
    f"nosuch://host/c#{CANARY}",
    f"nosuch://user:{CANARY}@host/c\0",
    f"nosuch://us@er:{CANARY}@host/c",
]


@pytest.mark.parametrize("url", SECRET_URLS)
async def test_errors_do_not_show_credentials(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    calls: list[Any] = [
        lambda: sidestream.save({"w": 1}, url),
        lambda: sidestream.load({"w": 1}, url),
        lambda: sidestream.open_checkpoint(url),
        lambda: sidestream.verify(url),
    ]
    for call in calls:
        with pytest.raises(errors.SidestreamError) as raised:
            await call()
        shown = [repr(raised.value), str(raised.value), *getattr(raised.value, "__notes__", ())]
        assert CANARY not in str(shown)
    with pytest.raises(errors.SidestreamError) as raised:
        sidestream.Checkpointer(url)
    assert CANARY not in str(raised.value)
    assert CANARY not in caplog.text


def test_what_is_left_of_a_url() -> None:
    assert [redacted(url) for url in SECRET_URLS] == [
        "nosuch://host/bucket/c", "nosuch://host/bucket/c", "nosuch://host/c", "nosuch://host/c\0", "nosuch://host/c",
    ]  # fmt: skip
    assert redacted("/a/b?c#d@e") == "/a/b?c#d@e"
    assert redacted("s3://bucket/run@2/x") == "s3://bucket/run@2/x"
