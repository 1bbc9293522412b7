"""URLs as they may be shown: credentials never reach a message, a log or a file."""

from __future__ import annotations

import re

__all__ = ["redacted"]

_URL = r"\b[a-z][a-z0-9+.-]*://"
_USER = re.compile(rf"({_URL})[^\s/\"'<>]+@", re.IGNORECASE)
_QUERY = re.compile(rf"({_URL}[^\s\"'<>?#]+)[?#][^\s\"'<>]*", re.IGNORECASE)


def redacted(text: str) -> str:
    """``text`` whose URLs have lost what may be a secret: user and password, query and fragment. Local paths, and
    everything else, stay as they are."""
    return _USER.sub(r"\1", _QUERY.sub(r"\1", text))
