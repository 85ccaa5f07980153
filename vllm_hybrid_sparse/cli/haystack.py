"""A long text with facts hidden in it, and the questions that ask for them."""

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from vllm_hybrid_sparse.cli.prose import prose

_BUILDINGS = ("lighthouse", "museum", "library", "observatory", "theatre", "castle")
_PARAGRAPH_SENTENCES = 7
_TOKENS_A_SENTENCE = 16  # fewer than a sentence of the grammar has on average
_LONGEST_SENTENCE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Fact:
    """One hidden sentence and the question that asks for it."""

    building: str
    number: str

    @property
    def sentence(self) -> str:
        """The hidden sentence."""
        return f"The secret number of the {self.building} is {self.number}."

    @property
    def question(self) -> str:
        """The question, with the answer begun: a small model then says the number first."""
        return (
            f"\n\nQuestion: What is the secret number of the {self.building}?\n"
            f"Answer: The secret number of the {self.building} is"
        )

    def found_in(self, answer: str) -> bool:
        """Return whether the answer names the number."""
        return self.number in answer


@dataclass(frozen=True, slots=True)
class Haystack:
    """A text and the facts in it, in the order in which they lie there."""

    text: str
    tokens: int
    facts: tuple[Fact, ...]


def make_haystack(tokenizer_file: Path, tokens: int, depths: tuple[float, ...], seed: int) -> Haystack:
    """Write a text of at most `tokens` tokens with one fact at each of the ascending `depths`.

    depths   0 is the start of the text, 1 its end; at most one for each building known here
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    buildings = rng.sample(_BUILDINGS, len(depths))
    facts = tuple(Fact(building, str(rng.randrange(10_000, 100_000))) for building in buildings)

    filler = prose(tokens // _TOKENS_A_SENTENCE + 1, seed)
    text, count = "", tokens + 1
    while count > tokens and filler:
        excess = max(0, count - tokens) // _LONGEST_SENTENCE_TOKENS + 1
        filler = filler[: len(filler) - excess]
        text = _assemble(filler, facts, depths)
        count = len(tokenizer.encode(text).ids)
    return Haystack(text, count, facts)


def _assemble(filler: list[str], facts: tuple[Fact, ...], depths: tuple[float, ...]) -> str:
    sentences = list(filler)
    for depth, fact in reversed(list(zip(depths, facts, strict=True))):  # from the end, so that no place moves
        sentences.insert(round(depth * len(filler)), fact.sentence)
    return "\n\n".join(
        " ".join(sentences[start : start + _PARAGRAPH_SENTENCES])
        for start in range(0, len(sentences), _PARAGRAPH_SENTENCES)
    )
