"""``SidestreamCheckpointManager`` in TorchTitan's trainer, on the CPU, with two ranks and FSDP."""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

from lives import Life, Program

from sidestream import blocking

PROGRAM = Path(__file__).parent / "torchtitan_program.py"
WORDS = "the model saves its state and the loop goes on while threads write the files of a step".split()


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
    """The programs of two ranks, and the runs that they make."""

    def __init__(self, programs: list[Program], assets: Path, folder: Path) -> None:
        self._programs = programs
        self._assets = assets
        self.folder = folder

    def begin(self, name: str, *, ranks: int = 2, **request: Any) -> list[Life]:
        """Begin to train in the directory ``name``."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return [
            program.life(
                rank=rank, world_size=ranks, port=port, folder=str(self.folder / name), assets=str(self._assets),
                result=str(self.folder / f"{name}.{rank}"), **{"manager": "sidestream", **request},
            )
            for rank, program in enumerate(self._programs[:ranks])
        ]  # fmt: skip

    def train(self, name: str, **request: Any) -> list[str]:
        """Train to the end, and return what rank 0 said."""
        lives = self.begin(name, **request)
        for life in lives:
            life.end()
        return lives[0].said

    def results(self, name: str, *, ranks: int = 2) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{name}.{rank}").read_text()) for rank in range(ranks)]

    def steps(self, name: str) -> list[int]:
        with blocking.Checkpointer(self.folder / name / "checkpoint", process_group="alone") as checkpoints:
            return checkpoints.steps()


@pytest.fixture(scope="module")
def programs() -> Iterator[list[Program]]:
    with Program(PROGRAM) as first, Program(PROGRAM) as second:
        yield [first, second]


@pytest.fixture
def ranks(programs: list[Program], assets: Path, tmp_path: Path) -> Ranks:
    return Ranks(programs, assets, tmp_path)


def test_a_run_in_two_parts_ends_as_a_whole_one(ranks: Ranks) -> None:
    """Also where what is trained on depends on random numbers."""
    ranks.train("whole", steps=6, noise=True)
    ranks.train("parts", steps=6, noise=True, stop_at=3)
    assert ranks.results("parts")[0]["step"] == 3
    assert "restored 3" in ranks.train("parts", steps=6, noise=True)
    assert ranks.results("parts") == ranks.results("whole")
    assert ranks.steps("parts") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_killed_in_a_save(kills: int, ranks: Ranks) -> None:
    """Each resume takes the newest complete step, and in the end the state is that of a run that was not killed."""
    chance = random.Random(seed := int.from_bytes(os.urandom(4), "little"))
    print("seed", seed)
    steps = 3 * kills + 3
    ranks.train("whole", steps=steps)
    saved: list[int] = []
    for _ in range(kills):
        lives = ranks.begin("killed", steps=steps, keep_latest_k=2)
        if saved:
            assert lives[0].until("restored") == f"restored {saved[-1]}"
        for _ in range(chance.randint(1, 3)):
            lives[0].until("saving")
        time.sleep(chance.uniform(0, 0.25))  # a save takes about as long
        victims = chance.choice([lives, lives[:1], lives[1:]])
        for life in victims:
            life.kill()
        for life in lives:
            if life not in victims:
                life.gone()  # without the other rank it fails
        saved = ranks.steps("killed")
        print("killed", len(victims), "of the ranks,", saved)
        for step in saved:
            assert blocking.verify(ranks.folder / "killed" / "checkpoint" / f"step-{step}").ok
    said = ranks.train("killed", steps=steps, keep_latest_k=2)
    assert not saved or f"restored {saved[-1]}" in said
    assert ranks.results("killed") == ranks.results("whole")
