"""Sets environment variables for our workers, and restores what the user had."""

import os

_given: dict[str, tuple[str | None, str]] = {}  # a variable's value before (None: unset), and ours


def give(name: str, value: str) -> None:
    """Set a variable in this process, and so in the processes that it starts."""
    _given[name] = os.environ.get(name), value
    os.environ[name] = value


def take_back() -> None:
    """Restore what the user had, for workers of another backend. A variable that has changed since stays as it is."""
    for name, (before, ours) in _given.items():
        if os.environ.get(name) != ours:
            continue
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    _given.clear()
