"""The commands that read the journals of ``sidestream.observability.Journal``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from .frame import AsJson, app, print_json, say, verb

if TYPE_CHECKING:
    from sidestream.observability.records import JournalContent

Journals = Annotated[list[str], typer.Argument(help="Journals, one of each rank.", metavar="JOURNAL...")]


@app.command()
@verb
def report(journals: Journals, as_json: AsJson = False) -> int:
    """Show what saves cost the training, by cause, for each journal."""
    from sidestream.observability.trace import report_of

    found = [(path, report_of(_read(path, quiet=as_json))) for path in journals]
    if as_json:
        print_json([{"journal": path, **one.as_dict()} for path, one in found])
        return 0
    for path, one in found:
        say(f"{path}: {one}")
    return 0


@app.command()
@verb
def trace(journals: Journals, output: Annotated[str, typer.Option("--output", "-o", help="The file to write.")]) -> int:
    """Write one trace of all journals as Chrome JSON, which https://ui.perfetto.dev opens."""
    from sidestream.observability.trace import trace_of

    found = trace_of([_read(path, quiet=False) for path in journals])
    content = json.dumps(found)  # first: what takes long leaves no part of a file when it is interrupted
    with open(output, "w", encoding="utf-8") as file:
        file.write(content)
    say(f"{output}: {len(found['traceEvents'])} events")
    return 0


def _read(path: str, *, quiet: bool) -> JournalContent:
    from sidestream.errors import InvalidOptionError
    from sidestream.observability.records import read_journal

    content = read_journal(path)
    if content.unreadable and not content.events and not content.lost:
        raise InvalidOptionError(f"{path} is not a journal: none of its {content.unreadable} lines can be read")
    if not quiet and (content.lost or content.unreadable):
        say(f"{path}: {content.lost} events were lost, {content.unreadable} lines cannot be read")
    return content
