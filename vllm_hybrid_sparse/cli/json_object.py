"""JSON objects that a user gives as an option."""

import json
from typing import Any

from vllm_hybrid_sparse.errors import ConfigError


def json_object(option: str, text: str) -> dict[str, Any]:
    """Read an option's text. ConfigError unless it is a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting of thousands of levels
        raise ConfigError(f"{option}={text:.80}: must be JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}={text}: must be a JSON object")
    return value
