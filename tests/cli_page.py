"""The page about the command line, made from the program itself.

    python tests/cli_page.py    # writes docs/cli.md

``tests/test_docs.py`` compares the page with the program.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"

HEAD = """\
# The command line

<!-- Made by `python tests/cli_page.py`. Change the help texts in src/sidestream_cli, and run it again. -->

`pip install 'sidestream[cli]'` brings the command `sidestream`. Completion of the shell is set up by
`sidestream --install-completion`.

"""


def page() -> str:
    """Return the text of the page."""
    from sidestream_cli.app import app

    program: Any = typer.main.get_command(app)
    parts = [HEAD, f"{program.help}\n\n{program.epilog}\n\n| command | what it does |\n|---|---|\n"]
    parts += [f"| [`{name}`](#{name}) | {one_line(command.help)} |\n" for name, command in program.commands.items()]
    for name, command in program.commands.items():
        parts += ["\n", *section(name, command)]
    return "".join(parts)


def section(name: str, command: Any) -> Iterator[str]:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option"]
    usage = [name, "[OPTIONS]", *(one.name.upper() if one.required else f"[{one.name.upper()}]" for one in arguments)]
    yield f"## {name}\n\n```text\nsidestream {' '.join(usage)}\n```\n\n{one_line(command.help)}\n\n"
    yield "| argument or option | meaning | default |\n|---|---|---|\n"
    for one in arguments:
        yield f"| `{one.name.upper()}` | {cell(one.help)} | {'required' if one.required else default(one)} |\n"
    for one in options:
        names = ", ".join(f"`{option}`" for option in (*one.opts, *one.secondary_opts))
        yield f"| {names} | {cell(one.help)} | {default(one)} |\n"


def default(parameter: Any) -> str:
    value = parameter.default
    return "" if value is None or value is False or value == [] else f"`{value}`"


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def cell(text: str | None) -> str:
    return one_line(text).replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
