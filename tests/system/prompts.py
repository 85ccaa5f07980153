"""Prompts for the exactness tests: token ids of plain prose, with lengths around every boundary that matters."""

import random
from pathlib import Path

from tokenizers import Tokenizer

from vllm_hybrid_sparse.cli.prose import prose

# Around pages (16), blocks (16, 32, 128), prefill chunks (256), the retained set (64 + 256), and well beyond it.
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 127, 128, 129, 240, 256, 257, 320, 321, 336, 400, 640, 900, 1400)
# How many tokens later prompts share with the prompt of 900 tokens: whole blocks of every size, and parts of them.
SHARED_LENGTHS = (255, 256, 600, 775, 899)
SHARED_BYTES = 512
# The prompts alone fill the KV cache of `variants.CAPACITY_TOKENS`, and each request is about to need another block.
CROWD, CROWD_TOKENS = 12, 240


def load_tokenizer(model: Path) -> Tokenizer:
    """Return the tokenizer of a model folder."""
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def _prose_ids(tokenizer: Tokenizer, tokens: int, seed: int) -> list[int]:
    text = " ".join(prose(tokens // 8 + 1, seed))
    return tokenizer.encode(text, add_special_tokens=False).ids[:tokens]


def exactness_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return one prompt a length, each of different prose."""
    return [_prose_ids(tokenizer, length, seed) for seed, length in enumerate(LENGTHS)]


def crowd_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return prompts that cannot all be answered at the same time."""
    return [_prose_ids(tokenizer, CROWD_TOKENS, seed=100 + index) for index in range(CROWD)]


def shared_byte_prompts() -> list[list[int]]:
    """Random byte tokens, for tiny models: prompts that begin alike and end with a page or within one, each twice."""
    rng = random.Random(0)
    beginning = [rng.randrange(256) for _ in range(SHARED_BYTES)]
    prompts = [beginning + [rng.randrange(256) for _ in range(length)] for length in (1, 16, 17, 100, 256, 257, 700)]
    return [[5, 6, 7], *prompts, *(list(prompt) for prompt in prompts)]


def repeating_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return prompts that say the same again and again and break off: what comes next can be looked up."""
    texts = [_prose_ids(tokenizer, length, seed) for seed, length in enumerate((40, 97, 130, 260), start=200)]
    return [(text * 3)[: 2 * len(text) + len(text) // 4] for text in texts]


def shared_prefix_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Return prompts that begin like the exactness prompt of 900 tokens, the first being that prompt itself."""
    base = exactness_prompts(tokenizer)[LENGTHS.index(900)]
    tail = tokenizer.encode(" Then everything changed, because", add_special_tokens=False).ids
    return [base, *(base[:shared] + tail for shared in SHARED_LENGTHS)]
