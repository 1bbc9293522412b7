"""A judge in a process of its own: what does anybody see who looks at a run on S3 now?

Reads one question from each line of its input, a JSON object with ``options`` (of fsspec), ``run`` (a URL), ``mib`` (of
the states) and ``known`` (directories that only sidestream has to read), and answers with one line: for every directory
with a marker the seed that sidestream reads there and the one that stock DCP reads, or an error as text; the keys
without a marker; the uploads that are open. It lists with a client that sidestream does not use, and has never seen the
process that is judged.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
import warnings
from functools import cache
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from _servers import BUCKET, Bucket, Endpoint
from _states import blank_state, seed_in
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

import sidestream


@cache
def _bucket(options: str) -> Bucket:
    """One client for all questions about a server: to make one takes longer than to ask."""
    return Bucket(Endpoint("s3", 0, json.loads(options)))


def answer(question: dict[str, Any]) -> dict[str, Any]:
    options, mib = question["options"], question["mib"]
    prefix = question["run"].partition(f"s3://{BUCKET}/")[2].rstrip("/") + "/"
    bucket = _bucket(json.dumps(options))
    keys, uploads = bucket.keys(prefix), bucket.open_uploads(prefix)
    names = [key[len(prefix) :] for key in keys]
    marked = sorted(name.removesuffix("/.metadata") for name in names if name.endswith("/.metadata"))
    return {
        "ours": {name: _ours(f"{question['run']}/{name}", options, mib) for name in marked},
        "stock": {
            name: _stock(f"{question['run']}/{name}", options, mib) for name in marked if name not in question["known"]
        },
        "unmarked": [name for name in names if name.partition("/")[0] not in marked],
        "uploads": uploads,
    }


def _ours(url: str, options: dict[str, Any], mib: int) -> int | str:
    state = blank_state(mib)
    try:
        asyncio.run(sidestream.load(state, url, storage_options=options))
        return seed_in(state, mib)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _stock(url: str, options: dict[str, Any], mib: int) -> int | str:
    state = blank_state(mib)
    try:
        reader = FsspecReader(url, use_listings_cache=False, skip_instance_cache=True, **options)
        dcp.load(state, storage_reader=reader, no_dist=True)
        return seed_in(state, mib)
    except (Exception, dcp.api.CheckpointException) as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", ResourceWarning)
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception:
            found = {"failed": traceback.format_exc()}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
