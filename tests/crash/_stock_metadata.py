"""Files as stock DCP would write them if it were lied to: real records of torch, really pickled."""

from __future__ import annotations

import copy
import io
import pickle
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _fuzzing import NASTY_NUMBERS, NASTY_TEXTS, NASTY_THINGS
from _seeded import make_state
from torch.distributed.checkpoint.metadata import Metadata


def stock_metadata(folder: Path) -> Metadata:
    """That of a real save."""
    dcp.save(make_state(1), checkpoint_id=folder, no_dist=True)
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def samples(folder: Path, count: int, r: random.Random) -> list[bytes]:
    """The real one, and many with one or two lies."""
    real = stock_metadata(folder)
    made = [pickle.dumps(real, protocol) for protocol in (2, 4, 5)]
    while len(made) < count:
        false = copy.deepcopy(real)
        try:
            for _ in range(r.choice([1, 1, 2])):
                lie(false, r)
            made.append(pickle.dumps(false, r.choice([2, 4, 5])))
        except (pickle.PicklingError, UnicodeEncodeError, OverflowError, TypeError, LookupError, AttributeError):
            continue
    return made


def lie(metadata: Metadata, r: random.Random) -> None:
    number, text = r.choice(NASTY_NUMBERS), r.choice(NASTY_TEXTS)
    numbers = torch.Size([max(-(1 << 63), min((1 << 63) - 1, r.choice(NASTY_NUMBERS))) for _ in range(r.randrange(5))])
    nasty: Any = copy.deepcopy(r.choice([number, text, numbers, *NASTY_THINGS]))
    described = metadata.state_dict_metadata
    tensor: Any = described["model.weight"]
    index, info = r.choice(list(metadata.storage_data.items()))
    match r.randrange(12):
        case 0:
            object.__setattr__(info, r.choice(["relative_path", "offset", "length", "transform_descriptors"]), nasty)
        case 1:
            object.__setattr__(info, "relative_path", text)
        case 2:
            object.__setattr__(info, r.choice(["offset", "length"]), number)
        case 3:
            object.__setattr__(index, r.choice(["fqn", "offset", "index"]), nasty)
        case 4:
            tensor.size = numbers
        case 5:
            tensor.chunks = r.choice([[], tensor.chunks * 2, tensor.chunks * 1000, None, nasty])
        case 6:
            chunk = tensor.chunks[0]
            object.__setattr__(chunk, r.choice(["offsets", "sizes"]), r.choice([numbers, nasty]))
        case 7:
            tensor.properties.dtype = r.choice([torch.float64, torch.quint8, torch.int8, None, text])
        case 8:
            described[text] = r.choice(list(described.values()))
        case 9:
            del metadata.storage_data[index]
        case 10:
            metadata.planner_data = r.choice([nasty, dict.fromkeys(described, nasty), {text: (text,) * 100}])
        case _:
            setattr(metadata, r.choice(["storage_data", "state_dict_metadata", "storage_meta"]), nasty)


def byte_item(value: object) -> bytes:
    """What stock DCP writes for a value that is no tensor."""
    item = io.BytesIO()
    torch.save(value, item)
    return item.getvalue()
