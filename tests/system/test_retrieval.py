"""SmolLM2 with a KV cache in bf16 and the default settings finds a needle wherever stock vLLM does.

Stock CPU_ATTN finds every needle of these prompts (`benchmarks/accuracy/needle.py` shows it next to the policies), so
here every one has to be found. The text to hide in is that of the file HYBRID_SPARSE_TEXT, or generated prose.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.accuracy.needle_prompts import ANSWER_TOKENS, NeedlePrompt, make_needle_prompts
from tests.system.completions import complete
from tests.system.prompts import load_tokenizer
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.kernels.paged_attention.native import lacks_bf16

SHORT = (((1024, 2048), (0.1, 0.3, 0.5, 0.8)), ((4096,), (0.3, 0.65)))  # lengths, depths


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Our backend with nothing set. If bf16 products are slow, only the KV cache is in bf16."""
    dtype = "float32" if lacks_bf16() else "bfloat16"
    args = [*stock_args(dtype, 8192, kv_cache_bytes=512 << 20), "--kv-cache-dtype=bfloat16"]
    args += [*our_args(), "--enforce-eager"]
    log_path = tmp_path_factory.mktemp("retrieval") / "server.log"
    with Server(smollm2, args, server_env(), log_path) as running:
        running.wait_ready(START_TIMEOUT_S)
        yield running


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    """The model's tokenizer."""
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def text_path() -> Path | None:
    """The text named in the environment."""
    named = os.environ.get("HYBRID_SPARSE_TEXT")
    return Path(named) if named else None


def assert_found(server: Server, tokenizer: Tokenizer, prompts: list[NeedlePrompt]) -> None:
    """Every needle is found; the message lists those that are not."""
    answers = complete(server, [prompt.token_ids for prompt in prompts], ANSWER_TOKENS, concurrency=1)
    texts = [tokenizer.decode(list(answer.token_ids)) for answer in answers]
    missed = [
        {"tokens": len(prompt.token_ids), "depth": prompt.depth, "needle": prompt.fact.number, "answer": text}
        for prompt, text in zip(prompts, texts, strict=True)
        if not prompt.fact.found_in(text)
    ]
    assert not missed, f"{len(missed)} of {len(prompts)} needles missed:\n" + "\n".join(map(json.dumps, missed))


def test_default_settings_find_needles(server: Server, tokenizer: Tokenizer, text_path: Path | None) -> None:
    """1K to 4K tokens, the needle at several depths."""
    groups = [make_needle_prompts(tokenizer, text_path, lengths, depths) for lengths, depths in SHORT]
    assert_found(server, tokenizer, [prompt for group in groups for prompt in group])


@pytest.mark.slow
def test_default_settings_find_every_needle(server: Server, tokenizer: Tokenizer, text_path: Path | None) -> None:
    """24 prompts of 1K, 2K, 4K and 7.5K tokens."""
    assert_found(server, tokenizer, make_needle_prompts(tokenizer, text_path))
