"""Code as users write it: objects with a state, and planners for DCP's calls. They fail, end the process, or note the
thread in which they are called."""

from __future__ import annotations

import os
import threading
from typing import Any

from _golden_states import counted

DIED = 7
"""The exit status of a process that ends in a call."""


class Custom:
    """No value that can be saved."""


class Holder:
    """An object with a state. Where it is called is recorded: in the thread of the loop or in another one."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value
        self.threads: list[str] = []
        self.loaded: Any = None
        self._made_in = threading.get_ident()

    def _here(self, method: str) -> None:
        self.threads.append(f"{method}: {'the same' if threading.get_ident() == self._made_in else 'another'} thread")

    def state_dict(self) -> dict[str, Any]:
        self._here("state_dict")
        return {"w": counted(3, plus=self.value), "n": int(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._here("load_state_dict")
        self.loaded = state


class Refusing(Holder):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def _here(self, method: str) -> None:
        if method == self._method:
            self._refuse()

    def _refuse(self) -> None:
        raise KeyError("not today")


class Lethal(Refusing):
    """Ends the process in one of its methods."""

    def _refuse(self) -> None:
        os._exit(DIED)


def failing(base: type, step: str) -> Any:
    """A planner that raises in ``step``."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ArithmeticError(f"nothing in {step}")

    return type("Failing", (base,), {step: fail})()
