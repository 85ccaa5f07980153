"""One request of a trace."""

import sys
from dataclasses import dataclass, replace
from typing import Any

from vllm_hybrid_sparse.errors import ConfigError

Prompt = str | tuple[int, ...] | tuple[dict[str, Any], ...]  # text, token ids, chat messages


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, independent of the server that will get it.

    prompt       text, a tuple of token ids, or a tuple of chat messages; not empty
    max_tokens   most output tokens, > 0
    ignore_eos   go on to `max_tokens` whatever the model says (vLLM's field; other servers may refuse it)
    arrival_s    when it arrived in the recorded run, seconds by any clock of it, >= 0; None if that is not known
    group        requests of one group begin with the same text, so that a server's prefix cache hits; None: of no group
    source       what made it, for the report: prose, documents, a task's name; None: not known
    """

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = False
    arrival_s: float | None = None
    group: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ConfigError("prompt: must not be empty")
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens}: must be at least 1")
        if self.arrival_s is not None and not 0 <= self.arrival_s <= sys.float_info.max:
            raise ConfigError(f"arrival_s={self.arrival_s}: must be 0 or more, finite")

    @property
    def kind(self) -> str:
        """Return `text`, `tokens` or `messages`."""
        if isinstance(self.prompt, str):
            return "text"
        return "messages" if isinstance(self.prompt[0], dict) else "tokens"

    def size(self) -> int:
        """Return the prompt's length in a unit that depends on its kind: for ordering prompts, not counting tokens."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        return sum(len(str(part.get("content"))) if isinstance(part, dict) else 1 for part in self.prompt)

    def salted(self, salt: str) -> "Request":
        """Return the request with `salt` as its first text, so that a prefix cached before does not match.

        Raises ConfigError for a prompt of token ids, since no text can be put before those.
        """
        if isinstance(self.prompt, str):
            return replace(self, prompt=salt + self.prompt)
        if self.kind == "tokens":
            raise ConfigError("salt=each-run: needs prompts of text or messages; these are token ids")
        first, *rest = (dict(part) for part in self.prompt if isinstance(part, dict))
        content = first.get("content")
        if isinstance(content, list):
            first["content"] = [{"type": "text", "text": salt}, *content]
        else:
            first["content"] = salt if content is None else f"{salt}{content}"
        return replace(self, prompt=(first, *rest))
