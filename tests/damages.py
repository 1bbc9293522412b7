"""Damages of a checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def flipped(at: float) -> Callable[[bytearray], None]:
    def edit(raw: bytearray) -> None:
        raw[int(at * (len(raw) - 1))] ^= 0x10

    return edit


def changed(pattern: str, edit: Callable[[bytearray], object]) -> Callable[[Path], None]:
    def apply(directory: Path) -> None:
        (path,) = directory.glob(pattern)
        raw = bytearray(path.read_bytes())
        edit(raw)
        path.write_bytes(raw)

    return apply


def _cut(raw: bytearray) -> None:
    del raw[-1:]


def _behind_a_link(directory: Path) -> None:
    (directory / "__0_1.distcp").rename(directory / "elsewhere")
    (directory / "__0_1.distcp").symlink_to("elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "shard cut off": changed("__0_1.distcp", _cut),
    "shard longer": changed("__0_1.distcp", lambda raw: raw.extend(b"x")),
    "shard gone": lambda directory: (directory / "__0_1.distcp").unlink(),
    "shard a link": _behind_a_link,
    "shard altered": changed("__0_1.distcp", lambda raw: raw.__setitem__(slice(None), bytes(b ^ 1 for b in raw))),
    "manifest cut off": changed("manifest-*", _cut),
    "manifest altered": changed("manifest-*", flipped(0.5)),
    "manifest gone": lambda directory: next(directory.glob("manifest-*")).unlink(),
    "metadata cut off": changed(".metadata", _cut),
    "metadata altered": changed(".metadata", flipped(0.2)),
    "metadata empty": changed(".metadata", lambda raw: raw.clear()),
    "metadata gone": lambda directory: (directory / ".metadata").unlink(),
    "marker altered": changed(".metadata", flipped(0.99)),
}
