"""The client of the demo, a process of its own: `python client.py PORT`. Needs nothing but the standard library."""

import http.client
import json
import os
import sys
import time
from contextlib import suppress

PAUSE_S = 0.002


def main(port: int) -> None:
    """Ask for the status until the server is gone, then write the times of all answers to stdout as JSON.

    A trainer that is killed takes its server along, so this process never outlives it.
    """
    answers: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with suppress(OSError, http.client.HTTPException):
        while True:
            ask(connection)
            answers.append(time.monotonic())
            time.sleep(PAUSE_S)
    with suppress(BrokenPipeError):  # the trainer was killed: nobody is left to read this
        os.write(sys.stdout.fileno(), json.dumps(answers).encode())


def ask(connection: http.client.HTTPConnection) -> None:
    connection.request("GET", "/status")
    response = connection.getresponse()
    status = json.loads(response.read())
    if response.status != http.client.OK or "step" not in status:
        raise http.client.HTTPException(f"the trainer answered {response.status}: {status}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
