"""Fixtures of the system tests: the model, the reference answers of stock vLLM, and tiny checkpoints."""

import json
from pathlib import Path

import pytest

from tests.system.completions import Answer
from tests.system.engine_jobs import answers_of, run_jobs
from tests.system.prompts import crowd_prompts, exactness_prompts, load_tokenizer, shared_prefix_prompts
from tests.system.variants import reference_engine_args
from vllm_hybrid_sparse.cli.smollm2 import model_dir

ANSWER_TOKENS = 32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything in this folder `system`."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct, converted on first use."""
    return model_dir()


@pytest.fixture(scope="session")
def exact_prompts(smollm2: Path) -> list[list[int]]:
    """The prompts of `LENGTHS`, as token ids."""
    return exactness_prompts(load_tokenizer(smollm2))


@pytest.fixture(scope="session")
def shared_prompts(smollm2: Path) -> list[list[int]]:
    """Prompts that share a prefix with the 900-token one, which comes first."""
    return shared_prefix_prompts(load_tokenizer(smollm2))


@pytest.fixture(scope="session")
def crowd(smollm2: Path) -> list[list[int]]:
    """Prompts that cannot all be answered at the same time."""
    return crowd_prompts(load_tokenizer(smollm2))


@pytest.fixture(scope="session")
def reference(
    smollm2: Path,
    exact_prompts: list[list[int]],
    shared_prompts: list[list[int]],
    crowd: list[list[int]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[tuple[int, ...], Answer]:
    """CPU_ATTN's greedy answer to every prompt, each computed alone by stock vLLM; kept as JSON next to its log."""
    folder = tmp_path_factory.mktemp("reference")
    prompts = exact_prompts + shared_prompts + crowd
    job = {
        "name": "stock",
        "engine_args": {"model": str(smollm2), **reference_engine_args()},
        "prompts": prompts,
        "max_tokens": ANSWER_TOKENS,
        "margins": True,
    }
    # One thread: with the servers of other files running, two wait for each other and take half as long again.
    result = run_jobs([job], folder / "stock.log", threads=1)["stock"]
    answers = answers_of(result)
    rows = [{"prompt": prompt, **answer} for prompt, answer in zip(prompts, result["answers"], strict=True)]
    (folder / "answers.json").write_text(json.dumps(rows), encoding="utf-8")
    for answer in answers:
        assert len(set(answer.token_ids)) > 4, "the model repeats itself: such answers prove nothing"
    return {tuple(prompt): answer for prompt, answer in zip(prompts, answers, strict=True)}
