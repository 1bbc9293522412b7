"""What is shown of public objects: the public path of a name as its ``__module__``, a short ``repr``, a table of rich,
a table in notebooks.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from ..errors import printable

T = TypeVar("T")


def public(named: T) -> T:
    """Set ``__module__`` of a class or function that users import from ``sidestream``, and return it.

    Tracebacks, ``repr`` and pickles then name the path that users import, and a pickle stays readable when the module
    that defines the name moves. ``typing.get_type_hints`` of such a class needs the defining module's names as its
    ``globalns``.
    """
    named.__module__ = "sidestream"
    return named


_MOST_ROWS = 200


@dataclass(frozen=True, slots=True)
class Table:
    """A table of ``count`` rows, each with one text for each of ``columns``. Only the first 200 rows are shown."""

    columns: Sequence[str]
    rows: Iterable[Sequence[str]]
    count: int

    def cells(self) -> Iterator[list[str]]:
        """Yield the rows that are shown, with escaped control characters."""
        return ([printable(cell) for cell in row] for row in islice(self.rows, _MOST_ROWS))

    @property
    def more(self) -> str:
        """The number of rows that are not shown, as text; empty if there are none."""
        return f"{self.count - _MOST_ROWS:,} more" if self.count > _MOST_ROWS else ""


class Displayed:
    """The base of classes with such representations. Subclasses define ``_summary`` and ``_table``, which may contain
    names from untrusted files."""

    __slots__ = ()

    def _summary(self) -> str:
        raise NotImplementedError

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {printable(self._summary())}>"

    def __rich__(self) -> Any:
        from rich.table import Table as RichTable
        from rich.text import Text

        table = self._table()
        shown = RichTable(title=Text(repr(self)), title_justify="left", caption=table.more or None)
        for column in table.columns:
            shown.add_column(column, overflow="fold")
        for row in table.cells():
            shown.add_row(*map(Text, row))
        return shown

    def _repr_html_(self) -> str:
        table = self._table()
        head = "".join(f"<th>{html.escape(column)}</th>" for column in table.columns)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.cells())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        more = f"<p>{table.more}</p>" if table.more else ""
        title = html.escape(repr(self))
        return f"<p>{title}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def readable_bytes(nbytes: float) -> str:
    """Return a number of bytes in decimal units, as in ``"305.4 MB"``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            break
        nbytes /= 1000
    return f"{nbytes:,.0f} {unit}" if unit == "B" else f"{nbytes:,.1f} {unit}"


def shortened(names: Sequence[str], most: int = 4) -> str:
    """Return the first ``most`` of ``names``, and how many more there are."""
    if len(names) <= most:
        return ", ".join(names) or "none"
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"
