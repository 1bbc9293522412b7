"""Compare with the golden sets, or record an intended difference.

``python tests/goldens/record.py`` shows what differs, and changes nothing.
``python tests/goldens/record.py --overlay 2026-12-01-wording --reason "..."`` writes what differs into
``sets/2026-12-01-wording``. The base set is never recorded again. The first record of a new scenario, or of a whole new
area, is written in the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # what the tests share, as pytest has it

from _golden_areas import AREAS, record
from _golden_sets import BASE, SETS, changed, differences, expected, write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overlay", help="the set to write, YYYY-MM-DD-topic; an existing one is recorded anew")
    parser.add_argument("--reason", help="one line: why the behaviour changed, or what is recorded for the first time")
    parser.add_argument("--area", action="append", choices=sorted(AREAS), help="only this area; may be repeated")
    asked = parser.parse_args()
    if asked.overlay and not asked.reason:
        parser.error("--overlay needs --reason")
    if asked.overlay == BASE and any((SETS / BASE / f"{area}.json").exists() for area in asked.area or AREAS):
        parser.error(f"{BASE} is the base set: it was recorded once; choose another name")
    left = 0
    for area in asked.area or AREAS:
        with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
            found = asyncio.run(record(area, Path(folder)))
        if asked.overlay:
            entries = changed(expected(area, without=asked.overlay), found)
            write(asked.overlay, area, entries, asked.reason)
            print(f"{area}: {len(entries)} of {len(found)} entries written")
        told = differences(area, expected(area), found)
        left += len(told)
        print("\n".join(told) if told else f"{area}: as recorded ({len(found)} entries)")
    if left and asked.overlay:
        print(f"{left} entries still differ: a later set has them too; choose a name that sorts after it")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
