"""Needle-in-a-haystack prompts: one fact hidden in a long text, and a question with the answer begun."""

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from vllm_hybrid_sparse.cli.haystack import Fact
from vllm_hybrid_sparse.cli.prose import prose
from vllm_hybrid_sparse.load.mixes import cut_to_words

CONTEXT_TOKENS = (1024, 2048, 4096, 7680)  # SmolLM2 holds 8192, answer included
DEPTHS = (0.1, 0.3, 0.5, 0.65, 0.8, 0.95)
ANSWER_TOKENS = 8
_BUILDINGS = ("lighthouse", "museum", "library", "bakery", "observatory", "theatre", "hospital", "castle")
_LEAST_SENTENCE_TOKENS = 12  # of generated prose, on average


@dataclass(frozen=True, slots=True)
class NeedlePrompt:
    """One retrieval task: token ids of the text with the fact in it, and of the question."""

    token_ids: tuple[int, ...]
    depth: float  # where the fact lies: 0 at the start of the text, 1 at its end
    fact: Fact


def _text(text_path: Path | None, seed: int, tokens: int) -> str:
    """Return text to hide the fact in, of at least `tokens` tokens if the file has that many.

    It is the file at `text_path`, from a place chosen by `seed`, or generated prose.
    """
    if text_path is None:
        return " ".join(prose(tokens // _LEAST_SENTENCE_TOKENS + 1, seed))
    lines = text_path.read_text(encoding="utf-8").splitlines(keepends=True)
    start = random.Random(seed).randrange(len(lines))
    return cut_to_words("".join(lines[start:] + lines[:start]), tokens)  # a word is a token or more


def make_needle_prompt(
    tokenizer: Tokenizer, context_tokens: int, depth: float, seed: int, text_path: Path | None
) -> NeedlePrompt:
    """Hide a five-digit number `depth` of the way through a text, so that the whole prompt is `context_tokens` long."""
    rng = random.Random(f"{context_tokens} {depth} {seed}")
    fact = Fact(rng.choice(_BUILDINGS), str(rng.randrange(10_000, 100_000)))

    fact_ids = tokenizer.encode(f"\n\n{fact.sentence}\n\n", add_special_tokens=False).ids
    question_ids = tokenizer.encode(fact.question, add_special_tokens=False).ids
    text_ids = tokenizer.encode(_text(text_path, rng.randrange(2**31), context_tokens), add_special_tokens=False).ids
    begin_ids = tokenizer.encode("").ids  # tokens that the tokenizer puts before every sequence
    text_tokens = context_tokens - len(begin_ids) - len(fact_ids) - len(question_ids)
    if text_tokens > len(text_ids):
        raise ValueError(f"context_tokens={context_tokens}: the text has only {len(text_ids)} tokens")
    place = round(depth * text_tokens)
    hidden_ids = (*text_ids[:place], *fact_ids, *text_ids[place:text_tokens])
    return NeedlePrompt((*begin_ids, *hidden_ids, *question_ids), depth, fact)


def make_needle_prompts(
    tokenizer: Tokenizer,
    text_path: Path | None,
    context_tokens: tuple[int, ...] = CONTEXT_TOKENS,
    depths: tuple[float, ...] = DEPTHS,
) -> list[NeedlePrompt]:
    """Return one prompt for every context length and depth."""
    return [
        make_needle_prompt(tokenizer, length, depth, seed=0, text_path=text_path)
        for length in context_tokens
        for depth in depths
    ]
