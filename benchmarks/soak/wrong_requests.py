"""Requests that no server should get: each with the HTTP statuses that are right answers to it, and random ones."""

import json
import random
from dataclasses import dataclass
from typing import Any

COMPLETIONS = "/v1/completions"
REFUSED = frozenset({400, 422})
_LONGEST_TOKENS = 32  # the most that a random request may ask for: its cost is not the point

Body = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """A request that is not as it should be."""

    name: str
    body: bytes
    right: frozenset[int] = REFUSED
    method: str = "POST"
    path: str = COMPLETIONS
    content_type: str = "application/json"


def good_body(model: str) -> Body:
    """Return the smallest request that is answered."""
    return {"model": model, "prompt": "The river", "max_tokens": 2, "temperature": 0}


def wrong_requests(model: str, model_tokens: int) -> list[Wrong]:
    """Return one request of each kind of mistake, for a server of `model` that takes `model_tokens` at most."""
    good = good_body(model)

    def changed(name: str, right: frozenset[int] = REFUSED, **changes: Any) -> Wrong:
        return Wrong(name=name, body=json.dumps(good | changes).encode(), right=right)

    answered = frozenset({200})
    unknown = frozenset({404})
    return [
        Wrong(name="no JSON", body=b'{"model": '),
        Wrong(name="nothing", body=b""),
        Wrong(name="not UTF-8", body=b'{"prompt": "\xff\xfe"}'),
        Wrong(name="a list", body=b"[1, 2, 3]"),
        Wrong(name="deep nesting", body=b"[" * 5000 + b"]" * 5000),
        Wrong(
            name="form data", body=b"prompt=x", content_type="application/x-www-form-urlencoded", right=REFUSED | {415}
        ),
        Wrong(name="no such path", body=b"{}", path="/v1/complete", right=unknown),
        Wrong(name="wrong method", body=b"", method="GET", right=frozenset({405})),
        changed("unknown field", right=answered, surprise={"a": [1, None]}),
        changed("unknown model", right=unknown, model="no such model"),
        changed("no prompt", prompt=None),
        changed("empty prompt", prompt=""),
        changed("prompt of another type", prompt={"text": "x"}),
        changed("prompt too long", prompt=[7] * (model_tokens + 1)),
        changed("token beyond the vocabulary", prompt=[10**9]),
        changed("negative token", prompt=[-1]),
        changed("max_tokens negative", max_tokens=-1),
        changed("max_tokens zero", max_tokens=0),
        changed("max_tokens not a number", max_tokens="many"),
        changed("temperature negative", temperature=-1),
        changed("temperature not a number", temperature=float("nan")),
        changed("temperature huge", temperature=1e30),
        changed("n above 1, greedy", n=3),
        changed("n above 1, sampled", right=answered, n=3, temperature=1),
        changed("n zero", n=0),
        changed("n huge", n=10**9, temperature=1),
        changed("top_p above 1", top_p=1.5, temperature=1),
        changed("top_k negative", top_k=-7, temperature=1),
        changed("too many logprobs", logprobs=10**6),
        changed("seed beyond 64 bits", seed=2**70),
        changed("stop of another type", stop=[{}]),
        changed("priority where there are none", right=answered, priority=5),
        changed("repetition penalty zero", repetition_penalty=0),
        changed("logit bias of no token", logit_bias={"ten": 1}),
        changed("min_tokens above max_tokens", min_tokens=10, max_tokens=2),
        changed("usage without stream", stream_options={"include_usage": True}),
        changed("broken pattern", structured_outputs={"regex": "("}),
    ]


_FIELDS = (
    "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stream", "stream_options",
    "logprobs", "echo", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "ignore_eos",
    "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias", "suffix", "user", "truncate_prompt_tokens",
    "prompt_logprobs", "skip_special_tokens", "add_special_tokens", "return_token_ids", "cache_salt", "request_id",
    "priority", "model", "no_such_field",
)  # fmt: skip
_LIKELY = (
    None, True, False, 0, 1, -1, 2, 16, 0.5, 1.0, 2**31, 2**63, 1e308, float("inf"), float("nan"), "", "x", "\u0000",
    "é" * 50, [], [0], [1, 2, 3], [[1, 2], [3]], ["a", "b"], {}, {"a": 1}, {"1": 5.0},
)  # fmt: skip


def random_request(model: str, rng: random.Random) -> bytes:
    """Return a request with one to four fields drawn at random, its JSON broken at times."""
    body = good_body(model)
    for _ in range(rng.randint(1, 4)):
        body[rng.choice(_FIELDS)] = rng.choice(_LIKELY)
    tokens = body["max_tokens"]
    if tokens is None or (isinstance(tokens, int | float) and tokens > _LONGEST_TOKENS):
        body["max_tokens"] = rng.randint(1, _LONGEST_TOKENS)
    text = json.dumps(body).encode()
    if rng.random() < 0.2:
        place = rng.randrange(len(text))
        text = text[:place] + bytes([rng.randrange(256)]) + text[place + rng.randrange(2) :]
    return text
