"""Escaping text from checkpoints so that it is safe to print or to log.

The name of a tensor, a file or a rank can hold escape sequences of a terminal, line breaks that would forge a line of a
log, characters that reverse the direction of text, and lone surrogates, which no encoding accepts.
"""

from __future__ import annotations

import re

__all__ = ["indented", "printable", "printable_lines"]

_UNINDENTED = re.compile(r"\n(?!  |\t)")
_LINE_BREAK = re.compile(r"\n")


def printable(text: str) -> str:
    r"""Return ``text`` on one line: each character that is not printable is replaced by its escape, as in ``\x1b`` or
    ``\u202e``.

    A character is printable if ``str.isprintable`` says so: letters, digits, marks, symbols and the space, of any
    script. A backslash is left unchanged, so that escaping the result again does not change it.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def printable_lines(text: str) -> str:
    """Return ``text`` as ``printable`` does, but keep a line break if the next line is indented by two spaces or a tab.

    The lists in messages are indented, so they are kept. No line after the first begins in the first column, where a
    name could forge another line of a log.
    """
    if text.isprintable():
        return text
    lines = _LINE_BREAK.split(_UNINDENTED.sub(r"\\n", text))
    return "\n".join(("\t" if line.startswith("\t") else "") + printable(line.removeprefix("\t")) for line in lines)


def indented(text: object) -> str:
    """Return the message of an exception of foreign code, indented as a part of another message: its line breaks are
    kept."""
    return _UNINDENTED.sub("\n  ", str(text))


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
