"""Prompts whose greedy answers are known, because each is served alone before the load begins."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from vllm_hybrid_sparse.cli.prose import prose

# Closer decisions are not asked for again. Next to other requests a matrix product may add up in another order, which
# changes float32 by 1e-6. If that selects a page more or less (policies below 100 %), logits move by far more.
LEAST_MARGIN = 0.1  # log-probability of the best token less that of the second
LEAST_TOKENS = 4  # a known answer that is shorter says little

_DOCUMENT_TOKENS = (300, 560, 900, 1400)
_ENDINGS = 4  # prompts that share a document, and so its blocks in the prefix cache
# Lengths around pages, blocks and retained sets, and with prefix hits of all tokens but one.
_EDGES = (1, 15, 16, 17, 127, 128, 129, 256, 257, 385)
_SHORT = 12  # further prompts of 20 to 500 tokens


@dataclass(frozen=True, slots=True)
class Known:
    """A prompt and what greedy decoding says to it, up to its first close decision."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def candidates(model: Path, seed: int) -> list[tuple[int, ...]]:
    """Return prompts of token ids, the same for the same seed; `firm` later keeps those with clear answers."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rng = random.Random(seed)

    def ids(tokens: int) -> tuple[int, ...]:
        text = " ".join(prose(tokens // 4 + 2, rng.getrandbits(32)))
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids[:tokens])

    documents = [ids(tokens) for tokens in _DOCUMENT_TOKENS]
    sharing = [document + ids(rng.randint(8, 40)) for document in documents for _ in range(_ENDINGS)]
    short = [ids(rng.randint(20, 500)) for _ in range(_SHORT)]
    return [*sharing, *map(ids, _EDGES), *short]


def firm(token_ids: Sequence[int], margins: Sequence[float]) -> tuple[int, ...]:
    """Return the tokens before the first whose decision was close; empty if too few are left."""
    kept = next((place for place, margin in enumerate(margins) if margin < LEAST_MARGIN), len(margins))
    return tuple(token_ids[:kept]) if kept >= LEAST_TOKENS else ()


def margins(top_logprobs: Sequence[dict[str, float]]) -> Iterator[float]:
    """Yield how far the best token was from the second, 0 if both have the same text."""
    for step in top_logprobs:
        best = sorted(step.values(), reverse=True)
        yield best[0] - best[1] if len(best) > 1 else 0.0
