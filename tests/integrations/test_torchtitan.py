"""``SidestreamCheckpointManager`` in TorchTitan's trainer, on the CPU, with two ranks and FSDP."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

from lives import Life, Program

from sidestream import blocking

PROGRAM = Path(__file__).parent / "torchtitan_program.py"
WORDS = [
    "the",
    "model",
    "saves",
    "its",
    "state",
    "and",
    "the",
    "loop",
    "goes",
    "on",
    "while",
    "threads",
    "write",
    "the",
    "files",
    "of",
    "a",
    "step",
]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and some text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    path, chance = tmp_path_factory.mktemp("assets"), random.Random(0)
    lines = [" ".join(chance.choices(WORDS, k=chance.randint(5, 40))) for _ in range(400)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"]))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (path / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


class Ranks:
    """A program whose children are two ranks, and the runs that they make."""

    def __init__(self, program: Program, assets: Path, folder: Path) -> None:
        self.program = program
        self._assets = assets
        self.folder = folder

    def begin(self, name: str, **request: Any) -> Life:
        """Begin to train in the directory ``name``."""
        paths = {"folder": self.folder / name, "result": self.folder / f"{name}.result", "assets": self._assets}
        given = {"world": 2, "manager": "sidestream", **request}
        return self.program.life(**{key: str(path) for key, path in paths.items()}, **given)

    def train(self, name: str, **request: Any) -> list[str]:
        """Train to the end, and return what rank 0 said."""
        life = self.begin(name, **request)
        life.end()
        return life.said

    def results(self, name: str) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{name}.result.{rank}").read_text()) for rank in range(2)]

    def steps(self, name: str) -> list[int]:
        with blocking.Checkpointer(self.folder / name / "checkpoint", process_group="alone") as checkpoints:
            return checkpoints.steps()


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with Program(PROGRAM) as program:
        yield program


@pytest.fixture
def ranks(program: Program, assets: Path, tmp_path: Path) -> Ranks:
    return Ranks(program, assets, tmp_path)


def test_a_run_in_two_parts_ends_as_a_whole_one(ranks: Ranks) -> None:
    """Also where what is trained on depends on random numbers."""
    ranks.train("whole", steps=6, noise=True)
    ranks.train("parts", steps=6, noise=True, stop_at=3)
    assert ranks.results("parts")[0]["step"] == 3
    assert "restored 3" in ranks.train("parts", steps=6, noise=True)
    assert ranks.results("parts") == ranks.results("whole")
    assert ranks.steps("parts") == [1, 2, 3, 4, 5, 6]


def test_on_another_number_of_ranks(ranks: Ranks) -> None:
    """TorchTitan's loader refuses a state of another number, so it is left out."""
    ranks.train("resized", steps=4, stop_at=2)
    said = ranks.train("resized", steps=4, world=1, exclude_from_loading=["dataloader"])
    assert "restored 2" in said
    assert ranks.steps("resized") == [1, 2, 3, 4]


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_killed_in_a_save(kills: int, ranks: Ranks) -> None:
    """Each resume takes the newest complete step, and in the end the state is that of a run that was not killed."""
    chance = random.Random(seed := int.from_bytes(os.urandom(4), "little"))
    print("seed", seed)
    steps = 3 * kills + 3
    ranks.train("whole", steps=steps)
    saved: list[int] = []
    for _ in range(kills):
        life = ranks.begin("killed", steps=steps, keep_latest_k=2)
        if saved:
            assert life.until("restored") == f"restored {saved[-1]}"
        for _ in range(chance.randint(1, 3)):
            life.until("saving")
        time.sleep(chance.uniform(0, 0.25))  # a save takes about as long
        victims = chance.choice([(0, 1), (0,), (1,)])
        life.kill(*victims)  # the other rank fails
        saved = ranks.steps("killed")
        print("killed", len(victims), "of the ranks,", saved)
        for step in saved:
            assert blocking.verify(ranks.folder / "killed" / "checkpoint" / f"step-{step}").ok
    said = ranks.train("killed", steps=steps, keep_latest_k=2)
    assert not saved or f"restored {saved[-1]}" in said
    assert ranks.results("killed") == ranks.results("whole")
