"""Aggregation: which words of a list, or of a text of made-up words, occur most often."""

import random

from vllm_hybrid_sparse.load.ruler.haystacks import Filler
from vllm_hybrid_sparse.load.ruler.question import Question
from vllm_hybrid_sparse.load.ruler.words import NOUNS, made_up_words

COMMON_WORDS = 10  # asked for of the list
FREQUENT_WORDS = 3  # asked for of the text
_LEAST_COMMON_TIMES = 3
_VOCABULARY = 40  # made-up words of the text


def build_common_words(rng: random.Random, filler: Filler, units: int, depth: float) -> Question:  # noqa: ARG001 - spread
    """A numbered list of about `units` words; ten of them occur at least three times as often as any other.

    Two fifths of the list are the common words; the others occur once, or more often in longer lists.
    A worked example on a short list comes first, as in RULER.
    """
    words = rng.sample(NOUNS, len(NOUNS))
    common, rare = words[:COMMON_WORDS], words[COMMON_WORDS:]
    example = _listed_words(rng, rare[:COMMON_WORDS], rare[COMMON_WORDS:15], units=0)
    answer = [f"{number}. {word}\n" for number, word in enumerate(rare[:COMMON_WORDS], start=1)]
    context = _listed_words(rng, common, rare, units)
    return Question(
        "A numbered list of words follows, in which some occur more often than others. Remember those that occur most "
        f"often.\n\n{example}\n\n{_ASKED_COMMON}\n{_BEGIN_COMMON}{''.join(answer)}",
        context,
        _ASKED_COMMON,
        f"{_BEGIN_COMMON}1.",
        tuple(common),
        tuple(common),
    )


_ASKED_COMMON = f"Which {COMMON_WORDS} words occur most often in the list?"
_BEGIN_COMMON = f"The {COMMON_WORDS} words that occur most often in the list are:\n"


def _listed_words(rng: random.Random, common: list[str], rare: list[str], units: int) -> str:
    times = max(_LEAST_COMMON_TIMES, round(0.4 * units / COMMON_WORDS))
    rare_items = max(len(rare[:5]), units - times * len(common))
    most = max(1, times // 3)
    distinct = min(len(rare), -(-rare_items // max(1, most // 2)))
    items = common * times + [rare[place % distinct] for place in range(min(rare_items, distinct * most))]
    rng.shuffle(items)
    return " ".join(f"{number}. {word}" for number, word in enumerate(items, start=1))


def build_frequent_words(rng: random.Random, filler: Filler, units: int, depth: float) -> Question:  # noqa: ARG001 - spread
    """About `units` made-up words whose frequency falls with the square of their rank; rank 1 is a filler sign."""
    words = made_up_words(rng, _VOCABULARY)
    shares = [1 / rank**2 for rank in range(1, _VOCABULARY + 2)]
    counts = [max(1, round(units * share / sum(shares))) for share in shares]
    for place in range(FREQUENT_WORDS, 0, -1):  # keeps the ranks asked for apart in short texts
        counts[place] = max(counts[place], counts[place + 1] + 1)
    items = [word for word, count in zip(["...", *words], counts, strict=True) for _ in range(count)]
    rng.shuffle(items)
    frequent = tuple(words[:FREQUENT_WORDS])
    return Question(
        "A coded text follows. Find out which words occur most often in it; the dots are no word.",
        " ".join(items),
        f"Which {FREQUENT_WORDS} words occur most often in the coded text?",
        f"The {FREQUENT_WORDS} words that occur most often in the coded text are:\n1.",
        frequent,
        frequent,
    )
