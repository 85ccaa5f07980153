"""A server to be measured, and how to ask it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self
from urllib.parse import urlsplit

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.requests import Request

MAX_TOKENS = "max_tokens"
MAX_COMPLETION_TOKENS = "max_completion_tokens"  # the only one that some models take in chats
_OURS = (  # fields of a request that the harness sets, or that would make it more than one answer
    "model", "prompt", "messages", MAX_TOKENS, MAX_COMPLETION_TOKENS, "stream", "stream_options", "n", "best_of",
)  # fmt: skip
_NAMED = re.compile(r"([\w.@+-]+)=(https?://.*)", re.DOTALL)


class Api(StrEnum):
    """The two endpoints that stream text."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class Usage(StrEnum):
    """What a server is asked to say about the number of tokens."""

    EACH_CHUNK = "each-chunk"  # vLLM's continuous_usage_stats
    TOTAL = "total"  # OpenAI's include_usage
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Address:
    """A server, with the name that the report gives it."""

    name: str
    root: str  # without /v1 and without a slash at the end

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Read `URL` or `NAME=URL`; the URL may end in /v1. The default name is host and port."""
        named = _NAMED.fullmatch(text)
        name, url = named.groups() if named else ("", text)
        rule = "must be http://HOST[:PORT], or NAME=http://HOST[:PORT]"
        try:
            parts = urlsplit(url)
            usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
            (parts.hostname or "").encode("idna")
        except ValueError as error:  # the port is not a number, or the host is no host
            raise ConfigError(f"{option}={text}: {rule}") from error
        if not usable or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{option}={text}: {rule}")
        return cls(name or parts.netloc, url.rstrip("/").removesuffix("/v1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, how to ask it, and how long to wait for it."""

    address: Address
    model: str
    api: Api = Api.COMPLETIONS
    usage: Usage = Usage.EACH_CHUNK
    timeout_s: float = 600.0  # for a request with all its attempts, > 0
    retries: int = 0  # further attempts if one ends before its first token because the server is unavailable, >= 0
    retry_wait_s: float = 0.5  # before the first of them; each further wait is twice as long
    api_key: str | None = field(default=None, repr=False)
    extra_body: Mapping[str, Any] = field(default_factory=dict)  # further fields of every request, none of `_OURS`
    limit_field: str = MAX_TOKENS  # that says how long an answer may be

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout={self.timeout_s}: must be above 0 s, finite")
        if self.retries < 0:
            raise ConfigError(f"retries={self.retries}: must be 0 or more")
        for name in self.extra_body:
            if name in _OURS:
                raise ConfigError(f"extra-body={name}: must be none of {', '.join(_OURS)}, by which we measure")

    @property
    def url(self) -> str:
        """Where requests are posted."""
        path = "chat/completions" if self.api is Api.CHAT else "completions"
        return f"{self.address.root}/v1/{path}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}

    def check(self, request: Request) -> None:
        """Raise ConfigError if the endpoint has no field for the request's kind of prompt."""
        if self.api is Api.CHAT and request.kind == "tokens":
            raise ConfigError("api=chat: has no prompts of token ids; use api=completions")
        if self.api is Api.COMPLETIONS and request.kind == "messages":
            raise ConfigError("api=completions: has no prompts of messages; use api=chat")

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body that is posted for a request."""
        body: dict[str, Any] = {
            "model": self.model,
            self.limit_field: request.max_tokens,
            "temperature": 0,
            "stream": True,
        }
        if self.api is Api.COMPLETIONS:
            body["prompt"] = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        elif isinstance(request.prompt, str):
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["messages"] = list(request.prompt)
        if request.ignore_eos:
            body["ignore_eos"] = True
        if self.usage is not Usage.NONE:
            body["stream_options"] = {"include_usage": True}
        if self.usage is Usage.EACH_CHUNK:
            body["stream_options"]["continuous_usage_stats"] = True
        return body | dict(self.extra_body)
