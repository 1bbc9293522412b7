"""The page about the command line: what stands below its mark is made from the program itself.

    python tests/cli_page.py    # writes that part of docs/cli.md

``tests/test_pages.py`` compares the page with the program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
MARK = "<!-- Made by `python tests/cli_page.py`. Change the help texts in src/sidestream_cli, and run it again. -->\n"
TABLE = "\n| option | meaning | default |\n|---|---|---|\n"


def page() -> str:
    """Return the text of the page."""
    from sidestream_cli.app import app

    program: Any = typer.main.get_command(app)
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    meanings: dict[str, list[Any]] = {}
    for one in (one for command in program.commands.values() for one in command.params):
        meanings.setdefault(one.help, []).append(one)
    shared = {meaning: found for meaning, found in meanings.items() if len(found) > 1}
    parts = [
        head,
        mark,
        f"\n{program.epilog}\n\n## Options of several commands\n",
        TABLE,
        *(row(*found) for found in shared.values()),
    ]
    for name, command in program.commands.items():
        parts += section(name, command, shared)
    return "".join(parts)


def section(name: str, command: Any, shared: Collection[str]) -> Iterator[str]:
    given = [(one.name.upper(), one.required) for one in command.params if one.param_type_name == "argument"]
    usage = " ".join([name, *(one if required else f"[{one}]" for one, required in given)])
    yield f"\n## {name}\n\n`sidestream {usage}`\n\n{one_line(command.help)}\n"
    own = [row(one) for one in command.params if one.help not in shared]
    yield from [TABLE, *own] if own else []
    options = [names(one) for one in command.params if one.help in shared and one.param_type_name == "option"]
    also = ", ".join(one for one in options if one != "`--json`")  # all have it: it stands at the top of the page
    yield f"\nAlso {also}.\n" if also else ""


def row(*parameters: Any) -> str:
    first, value = parameters[0], parameters[0].default
    default = "" if value in (None, False, []) else f"`{value}`"
    named = ", ".join(dict.fromkeys(map(names, parameters)))
    return f"| {named} | {one_line(first.help)} | {'required' if first.required else default} |\n"


def names(parameter: Any) -> str:
    found: Iterable[str] = (*parameter.opts, *parameter.secondary_opts)
    if parameter.param_type_name == "argument":
        found = [parameter.name.upper()]
    return ", ".join(f"`{one}`" for one in found)


def one_line(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
