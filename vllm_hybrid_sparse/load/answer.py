"""A streamed answer as it grows: when tokens came, and how many."""

import json
from enum import StrEnum
from typing import Any, NamedTuple

from vllm_hybrid_sparse.load.server_text import reported_error, whole
from vllm_hybrid_sparse.load.sse import EventDecoder, StreamError

_BROKEN_OFF = ("abort", "error")  # finish reasons


class Arrival(NamedTuple):
    """Tokens that came together."""

    at_s: float  # on the run's clock
    tokens: int  # at least 1


class Counted(StrEnum):
    """Where an answer's number of tokens comes from."""

    EACH_CHUNK = "usage of each chunk"  # exact, also how many came together
    TOTAL = "usage at the end"  # the number is exact; how many came together is not known
    CHUNKS = "chunks"  # the server gave no usage: counts chunks, which are tokens only if each holds one


class Answer:
    """Reads one streamed answer of /v1/completions or /v1/chat/completions.

    A chunk is an arrival if its usage, or its list of token ids, has grown. If the server sends neither, or a usage
    that stays 0 while text comes, a chunk with text is an arrival. So is an empty chunk that neither opens nor closes
    the answer, because servers hold text back while a character is incomplete. A usage whose growth does not add up to
    its last value was no count of the tokens so far: then chunks with text are arrivals, too.
    """

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.finish_reason: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.done = False  # whether the server has said that nothing follows
        self._decoder = EventDecoder()
        self._pieces: list[str] = []
        self._usage_tokens: int | None = None
        self._each_chunk: bool | None = None  # set by the first chunk
        self._text_s: list[float] = []  # when chunks with text came
        self._closing_s: float | None = None  # when the chunk with the finish reason came

    @property
    def text(self) -> str:
        """The text so far; a character whose halves came in two chunks is put together."""
        return whole("".join(self._pieces))

    @property
    def begun(self) -> bool:
        """Whether anything of a stream has come."""
        return self.done or bool(self._pieces)

    @property
    def counted(self) -> Counted:
        """Where `tokens` comes from."""
        if self._each_chunk:
            return Counted.EACH_CHUNK
        return Counted.TOTAL if self._usage_tokens else Counted.CHUNKS

    @property
    def tokens(self) -> int:
        """Output tokens so far, as far as the server tells."""
        if self._usage_tokens:
            return self._usage_tokens
        return sum(arrival.tokens for arrival in self.arrivals)

    def feed(self, piece: bytes, now_s: float) -> None:
        """Take a piece of the stream that came at `now_s`; StreamError if it makes no sense."""
        for data in self._decoder.feed(piece):
            if data == "[DONE]":
                self.done = True
            elif data:
                self._take(_parse(data), now_s)

    def finish(self) -> None:
        """Take note that the stream has ended; StreamError if it ended too early or no token came.

        An answer with a finish reason is whole, whatever is cut off after it. If vLLM breaks an answer off because it
        was told to stop or pause, it ends the stream in the same orderly way as after a whole answer.
        """
        self.done = self.done or self._decoder.rest == b"[DONE]"  # some servers leave its blank line out
        if not self.done and self.finish_reason is None:
            where = "inside an event" if self._decoder.unfinished else "before [DONE] and without a finish reason"
            raise StreamError(f"the stream ended {where}")
        if self.finish_reason in _BROKEN_OFF:
            raise StreamError(f"the server broke the answer off (finish reason {self.finish_reason})")
        missed = self._each_chunk and self._usage_tokens != sum(arrival.tokens for arrival in self.arrivals)
        if missed and len(self._text_s) > len(self.arrivals):
            self._each_chunk, self.arrivals = False, [Arrival(at_s, 1) for at_s in self._text_s]
        if not self.arrivals and self._usage_tokens and self._closing_s is not None:
            self.add(self._closing_s, 1)  # the only token generated is the one that ends the answer
        if not self.arrivals:
            raise StreamError("the stream ended without a token")

    def add(self, now_s: float, tokens: int) -> None:
        """Take note of `tokens` that came at `now_s`."""
        self.arrivals.append(Arrival(now_s, tokens))

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        if (message := reported_error(event)) is not None:
            raise StreamError(f"the server reports: {message}")
        usage, choices = event.get("usage"), event.get("choices")
        grown = self._take_usage(usage) if isinstance(usage, dict) else None
        if not choices:
            return
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise StreamError(f"choices is not a list of objects: {choices!r:.80}")
        choice = choices[0]
        content = choice.get("delta", choice)
        if content is None:  # some servers send null if nothing is added
            content = {}
        if not isinstance(content, dict):
            raise StreamError(f"delta is not an object: {content!r:.80}")
        if isinstance(choice.get("token_ids"), list):
            grown = len(choice["token_ids"])
        if self._each_chunk is None:  # servers that tell only at the end may do so in their last chunk
            self._each_chunk = grown is not None
        text = _text(content)
        self._pieces.append(text)
        self._text_s += [now_s] * bool(text)
        closing = choice.get("finish_reason") is not None
        if closing:
            self.finish_reason, self._closing_s = whole(str(choice["finish_reason"])), now_s
        if text and self._usage_tokens == 0 and "token_ids" not in choice:
            self._each_chunk = False  # some servers send a usage of zeros until the end
        if text and grown is None and self._each_chunk:
            self._each_chunk, self._usage_tokens = False, None  # others send one at the opening and one at the end
        if not self._each_chunk:
            held_back = not (closing or "role" in content)
            grown = int(bool(text or content.get("tool_calls")) or held_back)
        if grown is not None and grown > 0:
            self.add(now_s, grown)

    def _take_usage(self, usage: dict[str, Any]) -> int | None:
        """Return by how many tokens the usage has grown; None if it does not count them."""
        self.prompt_tokens = _count(usage, "prompt_tokens", self.prompt_tokens)
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count(details, "cached_tokens", self.cached_tokens)
        total = _count(usage, "completion_tokens", None)
        if total is None:
            return None
        before, self._usage_tokens = self._usage_tokens or 0, total
        return total - before


def _parse(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting of thousands of levels
        raise StreamError(f"an event is not JSON: {data!r:.80}") from error
    if not isinstance(event, dict):
        raise StreamError(f"an event is not an object: {data!r:.80}")
    return event


def _text(content: dict[str, Any]) -> str:
    parts = (content.get(key) for key in ("text", "reasoning_content", "reasoning", "content"))
    return "".join(part for part in parts if isinstance(part, str))


def _count(usage: dict[str, Any], key: str, otherwise: int | None) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) else otherwise
