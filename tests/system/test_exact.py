"""SmolLM2 in fp32: policies that promise to be exact answer as stock vLLM does, token for token, whatever happens."""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.system.completions import (
    Answer,
    complete,
    complete_together,
    complete_while_aborting,
    difference,
    metric,
    post,
)
from tests.system.conftest import ANSWER_TOKENS
from tests.system.variants import (
    DEFAULT_VARIANTS,
    EMULATED_VARIANTS,
    SLOW_VARIANTS,
    SMOLLM2_GROUPS,
    START_TIMEOUT_S,
    Variant,
    server_env,
)
from vllm_hybrid_sparse.cli.server import Server

ALONE_TOKENS = 16  # of an answer, if requests run one at a time, which makes each token slow
References = dict[tuple[int, ...], Answer]


def _cases() -> list[object]:
    slow = [
        pytest.param(variant, id=variant.name, marks=pytest.mark.slow) for variant in SLOW_VARIANTS + EMULATED_VARIANTS
    ]
    return [pytest.param(variant, id=variant.name) for variant in DEFAULT_VARIANTS] + slow


@pytest.fixture(scope="module", params=_cases())
def variant(request: pytest.FixtureRequest) -> Variant:
    """Each way to serve."""
    chosen: Variant = request.param
    return chosen


@pytest.fixture(scope="module")
def server(
    variant: Variant, smollm2: Path, reference: References, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server of ours for each variant, after stock vLLM has given its answers and ended."""
    assert reference
    log_path = tmp_path_factory.mktemp(variant.name) / "server.log"
    with Server(smollm2, variant.args, server_env(), log_path) as running:
        running.wait_ready(START_TIMEOUT_S)
        yield running


def assert_equal_answers(reference: References, prompts: Sequence[Sequence[int]], answers: Sequence[Answer]) -> None:
    """Fail with one line for every prompt whose answer is not the beginning of stock vLLM's."""
    wrong = []
    for prompt, answer in zip(prompts, answers, strict=True):
        how = difference(reference[tuple(prompt)].cut(len(answer.token_ids)), answer)
        if how:
            wrong.append(f"prompt of {len(prompt)} tokens: {how}")
    assert not wrong, f"{len(wrong)} of {len(prompts)} answers differ from CPU_ATTN's:\n" + "\n".join(wrong)


def evicted_pages(server: Server, variant: Variant) -> float:
    """Pages that made room for others in the device pool since the start; 0 without a device."""
    return metric(server, "vllm_hybrid_sparse_device_evicted_pages_total") if variant.pool_pages else 0.0


def test_alone(server: Server, variant: Variant, reference: References, exact_prompts: list[list[int]]) -> None:
    """One request at a time; prompts above 256 tokens are prefilled in chunks."""
    before = evicted_pages(server, variant)
    answers = complete(server, exact_prompts, ALONE_TOKENS, concurrency=1)
    assert {len(answer.token_ids) for answer in answers} == {ALONE_TOKENS}
    assert_equal_answers(reference, exact_prompts, answers)
    if variant.pool_pages:
        # A decode step wants a page of every group at least, and finds no more than the pool holds.
        steps, in_each = len(exact_prompts) * (ALONE_TOKENS - 1), SMOLLM2_GROUPS - variant.pool_pages
        assert evicted_pages(server, variant) - before > (steps - 1) * in_each


def test_batched(server: Server, reference: References, exact_prompts: list[list[int]]) -> None:
    """All requests at once, prompts in chunks between the tokens of others; blocks are reused."""
    answers = complete(server, exact_prompts, ANSWER_TOKENS, concurrency=len(exact_prompts))
    assert_equal_answers(reference, exact_prompts, answers)


def test_preempted(server: Server, reference: References, crowd: list[list[int]]) -> None:
    """Requests that outgrow the KV cache together: some lose their blocks and are computed again."""
    preempted = metric(server, "vllm:num_preemptions_total")
    answers = complete_together(server, crowd, ANSWER_TOKENS)
    assert_equal_answers(reference, crowd, answers)
    assert metric(server, "vllm:num_preemptions_total") > preempted, "nothing was preempted: the case is not tested"


def test_prefix_hits(server: Server, reference: References, shared_prompts: list[list[int]]) -> None:
    """A prompt repeated as it is, and prompts that share whole and partial blocks of it, alone and at once."""
    complete(server, shared_prompts[:1], ANSWER_TOKENS, concurrency=1)
    hits = metric(server, "vllm:prefix_cache_hits_total")
    for concurrency in (1, len(shared_prompts)):
        answers = complete(server, shared_prompts, ALONE_TOKENS, concurrency)
        assert_equal_answers(reference, shared_prompts, answers)
    least = sum(len(prompt) // 128 * 128 for prompt in shared_prompts[:2])  # tokens hit by the first two alone
    assert metric(server, "vllm:prefix_cache_hits_total") - hits >= least


def test_a_seeded_prompt_of_several_chunks_gives_the_same_tokens_again(
    server: Server, exact_prompts: list[list[int]]
) -> None:
    """A CPU's generator cannot be rewound, so stock vLLM 0.32 ends at a seeded prompt of more than one chunk."""
    prompt = max(exact_prompts, key=len)
    payload = {"model": server.model, "prompt": prompt, "max_tokens": 8, "temperature": 1.0, "return_token_ids": True}
    answers = []
    for seed in (7, 8, 7):
        status, body = post(server, payload | {"seed": seed, "cache_salt": str(len(answers))})
        assert status == 200, body
        answers.append(json.loads(body)["choices"][0]["token_ids"])
    assert answers[0] == answers[2] != answers[1]


def test_aborts_in_between(server: Server, reference: References, exact_prompts: list[list[int]]) -> None:
    """Clients that hang up disturb no other answer, and every block comes back."""
    short = [prompt for prompt in exact_prompts if len(prompt) <= 400]
    answers = complete_while_aborting(server, short, aborted=exact_prompts[-6:], max_tokens=ANSWER_TOKENS)
    assert_equal_answers(reference, short, answers)
    deadline = time.monotonic() + 20
    while metric(server, "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() < deadline, "blocks are still held 20 s after the last request"
        time.sleep(0.2)
