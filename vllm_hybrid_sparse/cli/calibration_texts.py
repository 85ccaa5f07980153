"""The token windows that a predictor is trained on: pieces of the user's texts, and prose that asks for facts."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vllm_hybrid_sparse.cli.haystack import Fact
from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.traces import read_text

_BUILDINGS = (
    "harbour office", "town hall", "brewery", "chapel", "sawmill", "post office", "prison", "aquarium", "bakery",
    "hospital", "windmill", "customs house", "stables", "orphanage", "cinema", "laundry", "waterworks", "monastery",
)  # fmt: skip
_FACTS_A_SEGMENT = 8
_TOKENS_A_SENTENCE = 6  # fewer than any sentence has


@dataclass(frozen=True, slots=True)
class TextWindow:
    """One prompt."""

    name: str  # the file's name without a folder, and a number
    source: str  # the file's name alone, or prose
    token_ids: Tensor  # [tokens] int64


def file_windows(
    tokenizer: PreTrainedTokenizerBase, path: Path, tokens: int, count: int, skip_tokens: int
) -> list[TextWindow]:
    """At most `count` disjoint windows, spread evenly over what follows the first `skip_tokens` tokens of the text.

    raises   ConfigError, `texts=path: rule`, for a file that cannot be read, is not UTF-8, or has no whole window
    """
    token_ids = _encode(tokenizer, read_text("texts", path))
    available = max(0, len(token_ids) - skip_tokens) // tokens
    if available < 1:
        raise ConfigError(
            f"texts={path}: has {len(token_ids)} tokens, must have {tokens} after the first {skip_tokens}"
        )
    kept = min(count, available)
    starts = [skip_tokens + (index * available // kept) * tokens for index in range(kept)]
    return [
        TextWindow(f"{path.name} {index}", path.name, token_ids[start : start + tokens].clone())
        for index, start in enumerate(starts)
    ]


def prose_window(
    tokenizer: PreTrainedTokenizerBase, number: int, tokens: int, segment_tokens: int, span_tokens: int, seed: int
) -> TextWindow:
    """A window of prose with facts in it; each segment ends with questions about any facts so far, and the answers.

    segment_tokens   length of a segment; what remains of `tokens` is prose
    span_tokens      length of the questions and answers at each segment's end
    """
    rng = random.Random(f"{seed} {number}")  # noqa: S311 - repeatable, not secret
    known: dict[str, Fact] = {}  # by building: its latest number counts
    parts: list[Tensor] = []
    for start in range(0, tokens, segment_tokens):
        length = min(segment_tokens, tokens - start)
        asked = span_tokens if length == segment_tokens else 0
        buildings = rng.sample(_BUILDINGS, _FACTS_A_SEGMENT)
        new = [Fact(building, str(rng.randrange(10_000, 100_000))) for building in buildings]
        known |= {fact.building: fact for fact in new}
        told = [_encode(tokenizer, f" {fact.sentence}") for fact in new]
        sentences = _prose_tokens(tokenizer, length - asked - sum(map(len, told)), rng.getrandbits(32))
        for fact_tokens in told:
            sentences.insert(rng.randrange(len(sentences)), fact_tokens)
        parts += [torch.cat(sentences)[: length - asked], _answered_questions(tokenizer, [*known.values()], asked, rng)]
    return TextWindow(f"prose {number}", "prose", torch.cat(parts))


def _answered_questions(
    tokenizer: PreTrainedTokenizerBase, facts: list[Fact], tokens: int, rng: random.Random
) -> Tensor:
    """Questions and answers of `tokens` tokens, each fact asked once before any is asked again."""
    answers = [torch.empty(0, dtype=torch.int64)]
    while sum(map(len, answers)) < tokens:
        order = rng.sample(facts, len(facts))
        answers.append(_encode(tokenizer, "".join(f"{fact.question} {fact.number}." for fact in order)))
    return torch.cat(answers)[:tokens]


def _prose_tokens(tokenizer: PreTrainedTokenizerBase, tokens: int, seed: int) -> list[Tensor]:
    """Sentences of `tokens` tokens in all, the last one cut to fit; at least one sentence, which may be empty."""
    sentences = [torch.empty(0, dtype=torch.int64)]
    for sentence in prose(max(0, tokens) // _TOKENS_A_SENTENCE + 1, seed):
        room = tokens - sum(map(len, sentences))
        if room <= 0:
            break
        sentences.append(_encode(tokenizer, f" {sentence}")[:room])
    return sentences


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(token_ids, dtype=torch.int64)
