"""A pytest plugin for ``nox -s integrations-transformers`` with transformers' own tests: their ``Trainer`` is
sidestream's."""

from __future__ import annotations

import sys
from typing import Any

from sidestream.integrations.transformers import SidestreamTrainer

# Not `import transformers`: the first import of its Trainer puts another module in the place of that one.
framework: Any = sys.modules["transformers"]
framework.Trainer = SidestreamTrainer
