"""Traces made from documents or prose, with fixed seeds: the same arguments give the same requests."""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.requests import Request

WriteProse = Callable[[int, int], str]  # (words, seed) → at least that many words

QUESTIONS = (
    "What is the text above about?",
    "Who or what is named most often in the text, and why does it matter there?",
    "Give the order of events in the text.",
    "Which places, numbers or dates does the text give, and for what?",
    "What does the text say near its beginning, and what near its end?",
    "Which claim of the text is the least well supported?",
    "Summarise the middle part of the text.",
    "What would a reader want to ask the author of this text?",
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths in tokens, each drawn in proportion to its weight."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, option: str, text: str) -> Self:
        """Read `LENGTH[:WEIGHT],…`, e.g. ``4096:3,8192:1``; a weight left out is 1."""
        tokens, weights = [], []
        for item in text.split(","):
            length, _, weight = item.partition(":")
            try:
                tokens.append(int(length))
                weights.append(float(weight) if weight else 1.0)
            except ValueError as error:
                raise ConfigError(f"{option}={text}: must be LENGTH[:WEIGHT],… in tokens, not {item!r}") from error
            if tokens[-1] < 1 or not 0 < weights[-1] < float("inf"):
                raise ConfigError(f"{option}={text}: lengths and weights must be above 0, finite")
        return cls(tuple(tokens), tuple(weights))

    def draw(self, rng: random.Random) -> int:
        """Return one of the lengths."""
        return rng.choices(self.tokens, self.weights)[0]


def cut_to_words(text: str, words: int) -> str:
    """Return the first `words` words of `text` with the space between them; all of it if it has fewer."""
    end = 0
    for _ in range(words):
        while end < len(text) and text[end].isspace():
            end += 1
        if end == len(text):
            return text
        while end < len(text) and not text[end].isspace():
            end += 1
    return text[:end]


def document_mix(
    documents: Mapping[str, str],
    questions: Sequence[str],
    each: int,
    output: Lengths,
    seed: int,
    *,
    words: int | None = None,
    ignore_eos: bool = True,
) -> list[Request]:
    """Return `each` questions about every document, in an order drawn from `seed`.

    documents   text by name; the name is the group of its requests, since their prompts begin with the same text
    questions   asked in turn, starting at a different one for each document; numbered from the second time on
    words       documents are cut to this many; None: not cut
    """
    if each < 1:
        raise ConfigError(f"questions-per-document={each}: must be at least 1")
    if not documents or not questions:
        raise ConfigError("documents: needs at least one document and one question")
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    requests = []
    for order, (name, document) in enumerate(documents.items()):
        text = document if words is None else cut_to_words(document, words)
        for number in range(each):
            turn, which = divmod(order + number, len(questions))
            again = f" (Answer {turn + 1}, in other words.)" if turn else ""
            prompt = f"{text}\n\nQuestion: {questions[which]}{again}\nAnswer:"
            max_tokens = output.draw(rng)
            requests.append(
                Request(prompt=prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, group=name, source="documents")
            )
    rng.shuffle(requests)
    return requests


def prose_mix(
    write: WriteProse,
    prompts: Lengths,
    output: Lengths,
    count: int,
    words_per_token: float,
    seed: int,
    *,
    ignore_eos: bool = True,
) -> list[Request]:
    """Return `count` requests to continue a text; no two of the texts begin alike.

    write             the generator of prose
    words_per_token   how many words of such prose make a token; the prompts' lengths are set with it, approximately
    """
    if count < 1:
        raise ConfigError(f"requests={count}: must be at least 1")
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    requests = []
    for number in range(count):
        words = max(1, round(prompts.draw(rng) * words_per_token))
        text = cut_to_words(write(words, rng.getrandbits(32)), max(1, words - 2))
        prompt = f"Text {number + 1}. {text}"
        max_tokens = output.draw(rng)
        requests.append(Request(prompt=prompt, max_tokens=max_tokens, ignore_eos=ignore_eos, source="prose"))
    return requests


def mixed(traces: Sequence[Sequence[Request]], seed: int) -> list[Request]:
    """Return the requests of all traces, interleaved by `seed`; each trace keeps its own order."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    turns = [number for number, trace in enumerate(traces) for _ in trace]
    rng.shuffle(turns)
    ways = [iter(trace) for trace in traces]
    return [next(ways[number]) for number in turns]


def first_of_groups(requests: Sequence[Request]) -> list[Request]:
    """Return the first request of each group: these fill a prefix cache for the rest of the group."""
    found: dict[str, Request] = {}
    for request in requests:
        if request.group is not None:
            found.setdefault(request.group, request)
    return list(found.values())


def salt_for(salt: str, side: str, run: str) -> str:
    """Return a first line that differs for every salt, server and run.

    It is of twelve digits, which most tokenizers cut evenly: so prompts have as many tokens on every server.
    """
    number = int.from_bytes(hashlib.sha256(repr((salt, side, run)).encode()).digest()[:8]) % 10**12
    return f"Run {number:012}.\n\n"
