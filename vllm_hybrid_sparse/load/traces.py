"""Recorded traces: JSON lines, one request each, in the order in which they are sent.

    {"prompt": "text", "max_tokens": 128}
    {"prompt": [1, 17, 5], "max_tokens": 128, "ignore_eos": true, "arrival_s": 0.25}
    {"messages": [{"role": "user", "content": "text"}], "max_tokens": 64, "group": "report.txt"}

prompt | messages   exactly one of them: text, token ids, or chat messages
max_tokens          at least 1
ignore_eos          optional, default false
arrival_s           optional, seconds by the clock of the recording, ascending; its first request is sent at once
group               optional: requests of one group begin with the same text
source              optional: what made the request, by which the report counts it

Blank lines are skipped; any other key is an error.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.requests import Prompt, Request
from vllm_hybrid_sparse.whole_file import whole_file

_KEYS = ("prompt", "messages", "max_tokens", "ignore_eos", "arrival_s", "group", "source")


def read_text(option: str, path: Path) -> str:
    """Return the UTF-8 text of a file; ConfigError names the option if it is missing, empty or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option}={path}: must be a readable file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option}={path}: must be UTF-8 (byte {error.start} is not)") from error
    if not text.strip():
        raise ConfigError(f"{option}={path}: must not be empty")
    return text


def write_text(path: Path, text: str) -> None:
    """Write a whole file as UTF-8, or leave the old one as it is; what UTF-8 cannot hold becomes JSON escapes."""
    with whole_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_trace(path: Path) -> list[Request]:
    """Return the requests of a recorded trace; ConfigError names the line that is wrong."""
    requests = []
    for number, line in enumerate(read_text("trace", path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line)))
        except ConfigError as error:
            raise ConfigError(f"trace={path}: line {number}: {error}") from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting of thousands of levels
            raise ConfigError(f"trace={path}: line {number}: must be JSON ({error})") from error
    return requests


def write_trace(path: Path, requests: Iterable[Request]) -> None:
    """Write requests so that `read_trace` returns the same."""
    lines = (json.dumps(_fields(request), ensure_ascii=False) for request in requests)
    write_text(path, "".join(f"{line}\n" for line in lines))


def _fields(request: Request) -> dict[str, Any]:
    key = "messages" if request.kind == "messages" else "prompt"
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    fields: dict[str, Any] = {key: prompt, "max_tokens": request.max_tokens}
    if request.ignore_eos:
        fields["ignore_eos"] = True
    if request.arrival_s is not None:
        fields["arrival_s"] = request.arrival_s
    if request.group is not None:
        fields["group"] = request.group
    if request.source is not None:
        fields["source"] = request.source
    return fields


def _request(line: object) -> Request:
    if not isinstance(line, dict):
        raise ConfigError("must be a JSON object")
    unknown = sorted(set(line) - set(_KEYS))
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown key; known are {', '.join(_KEYS)}")
    if ("prompt" in line) == ("messages" in line):
        raise ConfigError("must have exactly one of prompt and messages")
    max_tokens = line.get("max_tokens")
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool):
        raise ConfigError(f"max_tokens={max_tokens}: must be a whole number")
    arrival_s = line.get("arrival_s")
    if arrival_s is not None and (not isinstance(arrival_s, int | float) or isinstance(arrival_s, bool)):
        raise ConfigError(f"arrival_s={arrival_s}: must be a number of seconds")
    ignore_eos = line.get("ignore_eos", False)
    if not isinstance(ignore_eos, bool):
        raise ConfigError(f"ignore_eos={ignore_eos}: must be true or false")
    names = {key: line.get(key) for key in ("group", "source")}
    for key, name in names.items():
        if name is not None and not isinstance(name, str):
            raise ConfigError(f"{key}={name}: must be a text")
    prompt = _messages(line["messages"]) if "messages" in line else _prompt(line["prompt"])
    return Request(prompt=prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, arrival_s=arrival_s, **names)


def _prompt(prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt):
        return tuple(prompt)
    raise ConfigError("prompt: must be a text or a list of token ids")


def _messages(messages: object) -> Prompt:
    if isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages
    ):
        return tuple(messages)
    raise ConfigError("messages: must be a list of objects, each with a role")
