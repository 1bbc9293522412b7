"""Hook of mkdocs: each page of the site has its Markdown beside it, which is what docs/llms.txt links to."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def on_post_build(config: Any) -> None:
    for page in Path(config.docs_dir).rglob("*.md"):
        target = Path(config.site_dir, page.relative_to(config.docs_dir))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, target)
