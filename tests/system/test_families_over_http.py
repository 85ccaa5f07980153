"""The families of `test_families.py` again, each through two servers: stock vLLM's and ours."""

from pathlib import Path

import pytest

from tests.system.completions import complete, difference
from tests.system.test_families import ANSWER_TOKENS, LENGTHS, byte_prompts
from tests.system.tiny_models import SERVED, make_tiny_model
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server

ARGS = [*stock_args("float32", 2048, kv_cache_bytes=128 << 20), "--enforce-eager", "--max-num-batched-tokens=256"]


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_family_answers_as_stock_over_http(family: str, tmp_path: Path) -> None:
    """All prompts at once, `progressive` with a threshold of 1 and blocks of 16 against stock vLLM."""
    model = make_tiny_model(family, tmp_path)
    prompts = byte_prompts(seed=len(family))
    ours = [*our_args(policy="progressive", threshold=1.0), "--block-size=16"]
    answers = []
    for name, args in (("stock", ARGS), ("ours", ARGS + ours)):
        with Server(model, args, server_env(), tmp_path / f"{name}.log") as server:
            server.wait_ready(START_TIMEOUT_S)
            answers.append(complete(server, prompts, ANSWER_TOKENS, concurrency=8, margins=name == "stock"))
    wrong = [
        f"prompt of {length} tokens: {how}"
        for length, expected, found in zip(LENGTHS, *answers, strict=True)
        if (how := difference(expected, found))
    ]
    assert not wrong, f"{len(wrong)} of {len(LENGTHS)} answers differ from CPU_ATTN's:\n" + "\n".join(wrong)
