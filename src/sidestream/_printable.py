"""Text that is safe to print or to log, whatever names a checkpoint gives to its tensors, files and ranks.

A name can hold escape sequences of a terminal, line breaks that would forge a line of a log, characters that reverse
the direction of text, and lone surrogates, which no encoding takes.
"""

from __future__ import annotations

import re

__all__ = ["indented", "printable", "printable_lines"]

_UNINDENTED = re.compile(r"\n(?!  |\t)")
_LINE_BREAK = re.compile(r"\n")


def printable(text: str) -> str:
    r"""``text`` on one line: each character that is not printable stands as its escape, as in ``\x1b`` or ``\u202e``.

    Printable is what ``str.isprintable`` says: letters, digits, marks, symbols and the space, of any script. A
    backslash stays as it is, so that the result does not change when it passes through here again.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def printable_lines(text: str) -> str:
    """As ``printable``, for a message: a line break stays where the next line is indented, by two spaces or a tab.

    The lists in messages are indented. So no line after the first begins in the first column, where a name could
    pretend to be another line of a log.
    """
    if text.isprintable():
        return text
    lines = _LINE_BREAK.split(_UNINDENTED.sub(r"\\n", text))
    return "\n".join(("\t" if line.startswith("\t") else "") + printable(line.removeprefix("\t")) for line in lines)


def indented(text: object) -> str:
    """The message of an exception of foreign code, as a part of one of ours: its own line breaks stay."""
    return _UNINDENTED.sub("\n  ", str(text))


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
