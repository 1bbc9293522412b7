"""Removing credentials from URLs, so that none reaches a message, a log or a file."""

from __future__ import annotations

import re

__all__ = ["redacted"]

# Messages hold names from checkpoints, and ``re`` keeps the GIL. So each pattern looks at a character a bounded number
# of times: a match begins where a run of these characters begins, and a URL without a query is a match, too.
_URL = r"(?<![a-z0-9+.-])[a-z0-9+.-]+://"
_USER = re.compile(rf"({_URL})[^\s/\"'<>]+@", re.IGNORECASE)
_QUERY = re.compile(rf"({_URL}[^\s\"'<>?#]+)(?:[?#][^\s\"'<>]*)?", re.IGNORECASE)


def redacted(text: str) -> str:
    """Return ``text`` without the user, password, query and fragment of the URLs in it, which may hold secrets. Local
    paths and all other text stay unchanged."""
    return _USER.sub(r"\1", _QUERY.sub(r"\1", text))
