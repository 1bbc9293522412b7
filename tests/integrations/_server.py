"""A process that has imported a module of cases, and forks a child for each order.

The import of a framework takes several seconds, and a test that kills trainers starts many of them. Orders and answers
are lines of JSON; ``servers`` in conftest.py sends them. A child leads a process group of its own. It reports progress
by a byte to the descriptor in ``SIDESTREAM_REPORTS``: after so many reports and a delay its group can be killed.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def _child(module: Any, order: dict[str, Any], answer: int) -> None:
    os.setsid()
    os.chdir(order["directory"])
    log = os.open(Path(order["directory"], "log.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2)
    try:
        result = {"returned": getattr(module, order["case"])(**order["options"])}
    except BaseException:
        result = {"raised": traceback.format_exc()}
    with os.fdopen(answer, "w") as out:
        json.dump(result, out)
    if "raised" in result:
        os._exit(1)  # saves that the case still holds would keep the process
    sys.exit(0)  # as a program ends, with what runs at exit


def _serve(module: Any, order: dict[str, Any]) -> dict[str, Any]:
    answer_in, answer = os.pipe()
    reports_in, reports = os.pipe()
    os.environ["SIDESTREAM_REPORTS"] = str(reports)
    pid = os.fork()
    if pid == 0:
        os.close(answer_in), os.close(reports_in)
        _child(module, order, answer)
    os.close(answer), os.close(reports)
    seen, text, began = 0, b"", time.monotonic()
    kill_at: float | None = None
    while True:
        wait_s = 300.0 if kill_at is None else kill_at - time.monotonic()
        pipes = [answer_in, *([reports_in] if reports_in >= 0 else [])]
        ready = select.select(pipes, [], [], wait_s)[0] if wait_s > 0 else []
        if not ready:  # the moment has come; or the child hangs
            os.killpg(pid, signal.SIGKILL)
            if kill_at is None:
                text = json.dumps({"raised": f"no answer in {time.monotonic() - began:.0f} s"}).encode()
            break
        if reports_in in ready:
            got = os.read(reports_in, 1 << 16)
            seen += len(got)
            if not got:
                os.close(reports_in)
                reports_in = -1
            if kill_at is None and order["kill_after"] is not None and seen >= order["kill_after"]:
                kill_at = time.monotonic() + order["delay_s"]
        if answer_in in ready:
            got = os.read(answer_in, 1 << 16)
            text += got
            if not got:
                break
    os.close(answer_in)
    if reports_in >= 0:
        os.close(reports_in)
    os.waitpid(pid, 0)
    if text:
        return json.loads(text)  # type: ignore[no-any-return]
    return {"killed": seen}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the module prints
    module = importlib.import_module(sys.argv[1])
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_serve(module, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
