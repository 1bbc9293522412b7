"""What people see of the objects that they hold: in a traceback, a terminal and a notebook."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from pathlib import Path

import torch
from held import HeldStager
from rich.console import Console

import sidestream

STATE = {"model": {"w": torch.ones(300, 10), "<b>\x1b[31m": torch.ones(2)}, "step": 3}


class _Cells(HTMLParser):
    """Collects the tags and texts of a page. A name of a tensor that became a tag would be seen."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


async def test_short_and_safe(tmp_path: Path) -> None:
    async with HeldStager() as held:
        pending = sidestream.async_save(STATE, tmp_path / "c", stager=held)
        assert repr(pending).startswith(f"<PendingSave {tmp_path}/c: stag")
        held.let_go()
        info = await pending
    assert repr(pending).startswith(f"<PendingSave {tmp_path}/c: committed, ")
    assert repr(info).startswith(f"<SaveInfo {tmp_path}/c: ")
    checkpoint = await sidestream.open_checkpoint(tmp_path / "c")
    assert repr(checkpoint) == f"<Checkpoint {tmp_path}/c: 2 tensors, 1 values>"
    target = {"model": {"w": torch.zeros(300, 10)}, "other": 1}
    report = await sidestream.load(target, tmp_path / "c", strict=False)
    assert repr(report) == f"<LoadReport {tmp_path}/c: 1 loaded, 12.0 kB, 1 missing, 1 unexpected>"
    verified = await sidestream.verify(tmp_path / "c")
    assert f"{tmp_path}/c: ok, 3 verified, " in repr(verified)
    async with sidestream.Checkpointer(tmp_path / "run") as checkpoints:
        await checkpoints.save(STATE, step=7)
        health = checkpoints.health()
        assert repr(health) == "<Health ok: step 7 saved 0 s ago, 0 pending>"
    for shown in (pending, info, checkpoint, report, verified, health):
        assert "\x1b" not in repr(shown)
        page = _Cells(shown._repr_html_())
        assert set(page.tags) <= {"p", "table", "thead", "tbody", "tr", "th", "td"}
        console = Console(width=100, record=True, file=io.StringIO())
        console.print(shown)
        assert type(shown).__name__ in console.export_text()
    assert "model.<b>\\x1b[31m" in _Cells(checkpoint._repr_html_()).texts


async def test_a_large_checkpoint_shows_its_first_rows(tmp_path: Path) -> None:
    await sidestream.save({f"t{number}": number for number in range(1_000)}, tmp_path / "c")
    page = _Cells((await sidestream.open_checkpoint(tmp_path / "c"))._repr_html_())
    assert page.tags.count("tr") == 201
    assert "800 more" in page.texts
