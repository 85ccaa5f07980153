"""Text that a server sent about itself, made fit for a report."""

import json
from typing import Any

_SHOWN_CHARACTERS = 300


def whole(text: str) -> str:
    """Return text that UTF-8 can hold: JSON may contain a lone half of a character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shortened(text: str) -> str:
    """Return text on one line, at most 300 characters of it."""
    return whole(" ".join(text.split())[:_SHOWN_CHARACTERS])


def reported_error(event: dict[str, Any]) -> str | None:
    """Return the error that an event of a stream reports; None if it reports none.

    It is in `error`, an object with a `message` or a text, or the event is itself an object of the kind `error`.
    """
    error = event.get("error") or (event if event.get("object") == "error" else None)
    return whole(_message(error)) if error else None


def error_in_body(body: str) -> str | None:
    """Return the message in a JSON answer that is an error, shortened; None if it is no JSON or has none.

    The message is where a stream reports it, or in `detail` (FastAPI's, a text or a list) or `message`.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    error = answer.get("error") or answer.get("detail") or answer.get("message")
    return shortened(_message(error)) or None if error else None


def _message(error: object) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error
    return error if isinstance(error, str) else json.dumps(error)
