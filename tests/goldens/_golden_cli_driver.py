"""Runs command lines of ``sidestream`` one after the other in one process: imports cost seconds, each time.

Reads a JSON list of argument lists from standard input; writes a JSON list of ``[exit code, output, error output]``.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile

from _golden_table import fixed

from sidestream_cli import main


def run(arguments: list[str]) -> tuple[int, str, str]:
    """As a process would: what goes to the two descriptors, and the exit code."""
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        sys.argv = ["sidestream", *arguments]
        try:
            main()
            code = 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        except Exception as error:  # what a user would see as a traceback
            code = -1
            os.write(2, f"traceback: {type(error).__name__}: {error}".encode())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        output.seek(0)
        errors.seek(0)
        return code, output.read().decode(), errors.read().decode()


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    with fixed():
        answers = [run(arguments) for arguments in asked]
    io.FileIO(1, "w", closefd=False).write(json.dumps(answers).encode())
