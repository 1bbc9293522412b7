"""Saves and exports that do not fit on their file system, noticed before anything is written.

On a tmpfs, where what is larger than the free space surely does not fit. Tensors of one element are expanded to more
than that, so the tests need little memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from keywords import for_save

import sidestream
from sidestream import errors
from sidestream._runtime.threads import Deadline, time_limit
from sidestream._storage import Attempt, BytesBody, LocalStore, Space

SHM = Path("/dev/shm")  # only there as a tmpfs
GIB = 1 << 30


@pytest.fixture
def shm() -> Iterator[Path]:
    if not os.path.ismount(SHM):
        pytest.skip("there is no tmpfs at /dev/shm")
    directory = SHM / f"sidestream-{uuid.uuid4().hex}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


def free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def of_bytes(nbytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros((), dtype=dtype).expand(nbytes // dtype.itemsize)


async def test_a_save_that_does_not_fit(shm: Path) -> None:
    nbytes = free(shm) + GIB
    state = {"w": of_bytes(nbytes), "n": 1}
    with pytest.raises(errors.NoSpaceError, match=r"\d{9,} bytes are needed, and \d+ are free: free space") as refused:
        await sidestream.save(state, shm / "run" / "c", options=sidestream.SaveOptions(streaming=True))
    asked = int(re.search(r"(\d+) bytes are needed", str(refused.value))[1])  # type: ignore[index]
    assert nbytes - 4 <= asked <= nbytes + (1 << 20)
    assert list(shm.iterdir()) == []
    await sidestream.save({"w": torch.ones(3)}, shm / "c")
    with pytest.raises(errors.NoSpaceError):
        await sidestream.save(state, shm / "c", overwrite=True, options=sidestream.SaveOptions(streaming=True))
    with pytest.raises(errors.NoSpaceError):
        await sidestream.save(
            {"w": of_bytes(2 * nbytes)}, shm / "d", options=sidestream.SaveOptions(streaming=True, dtype=torch.float32)
        )
    assert [path.name for path in shm.iterdir()] == ["c"]
    assert (await sidestream.verify(shm / "c")).ok


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 128 MiB where this process may mount one; otherwise ``/dev/shm``, if that is not large."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(place)]
    if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
        yield place
        subprocess.run(["umount", str(place)], check=True)
        return
    if not os.path.ismount(SHM) or free(SHM) > 8 * GIB:
        pytest.skip("no tmpfs can be mounted, and /dev/shm is missing or takes too long to fill")
    directory = SHM / f"sidestream-{uuid.uuid4().hex}"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


async def test_a_file_system_without_a_size(tmp_path: Path) -> None:
    """A tmpfs without a limit reports neither blocks nor free space."""
    place = tmp_path / "endless"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=0", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no tmpfs can be mounted")
    try:
        await sidestream.save({"w": torch.ones(3)}, place / "c")
        assert (await sidestream.verify(place / "c")).ok
    finally:
        subprocess.run(["umount", str(place)], check=True)


async def test_an_export_that_does_not_fit_is_no_matter_to_the_checkpoint(small: Path, tmp_path: Path) -> None:
    """The export is eight times as large as the checkpoint."""
    nbytes = free(small) // 8 + (1 << 20)
    state = {"w": of_bytes(nbytes, torch.float8_e4m3fn)}
    for number, options in enumerate(({}, {"streaming": True})):
        exports = [
            sidestream.HF(small / f"large{number}", dtype=torch.float64),
            sidestream.HF(tmp_path / f"elsewhere{number}"),
        ]
        info = await sidestream.save(state, tmp_path / str(number), export=exports, **for_save(**options))
        failed, report = info.exports
        assert isinstance(failed, errors.NoSpaceError)
        assert "bytes are needed" in str(failed)  # found before anything was written
        assert report.nbytes > nbytes
        shutil.rmtree(tmp_path / f"elsewhere{number}")
    assert list(small.iterdir()) == []
    with pytest.raises(errors.NoSpaceError, match="bytes are needed"):
        await sidestream.convert(tmp_path / "0", small / "converted", dtype=torch.float64)
    assert list(small.iterdir()) == []


def test_what_a_save_still_writes_is_counted_and_nothing_twice(shm: Path) -> None:
    """The checkpoint takes precedence; what it has written already is not counted again, whether its files are there
    or it has ended."""
    store, space = LocalStore(shm), Space()
    first, second, third = (store.begin(Attempt(name, "files", uuid.uuid4().hex, "flush")) for name in ("a", "b", "c"))
    half, content = free(shm) // 2, bytes(8 << 20)
    space.expect(first, half)
    space.take(second, half - (32 << 20))
    with pytest.raises(errors.NoSpaceError, match="beside"):
        space.take(third, 64 << 20)
    space.take(first, half, alone=True)  # and the exports fail, when the disk is full
    with time_limit(Deadline.after(60)):
        first.write([("file", BytesBody(content))])
        space.take(third, 16 << 20)
        first.discard()
    space.take(third, half)
    with pytest.raises(errors.NoSpaceError):
        space.take(first, 4 * half, alone=True)


async def test_nothing_is_refused_where_it_may_fit(tmp_path: Path) -> None:
    """Object storage has no such limit."""
    target = f"memory://space/{uuid.uuid4().hex}"
    await sidestream.save({"w": torch.ones(3)}, target)
    assert (await sidestream.verify(target)).ok
