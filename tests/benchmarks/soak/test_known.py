"""Only tokens that were decided clearly are asked for again."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.soak.known import LEAST_MARGIN, LEAST_TOKENS, candidates, firm, margins


def test_an_answer_ends_before_its_first_close_decision() -> None:
    clear = [2 * LEAST_MARGIN] * 6
    assert firm(range(6), clear) == (0, 1, 2, 3, 4, 5)
    assert firm(range(6), [*clear[:5], LEAST_MARGIN / 2]) == (0, 1, 2, 3, 4)
    assert firm(range(6), [*clear[:5], LEAST_MARGIN]) == (0, 1, 2, 3, 4, 5)  # a margin at the bound is clear


def test_an_answer_of_too_few_clear_tokens_is_none() -> None:
    clear = [1.0] * (LEAST_TOKENS - 1)
    assert firm(range(9), [*clear, 0.0, *[1.0] * 5]) == ()
    assert firm((), ()) == ()


def test_margins_are_between_the_best_two_whatever_their_order() -> None:
    assert list(margins([{"a": -2.0, "b": -0.5, "c": -3.0}, {"same": -1.0}])) == [1.5, 0.0]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer that makes one token of each character."""
    letters = {chr(code): code for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="~"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_prompts_share_documents_differ_and_are_the_same_again(model: Path) -> None:
    prompts = candidates(model, seed=3)
    assert prompts == candidates(model, seed=3) != candidates(model, seed=4)
    assert len(set(prompts)) == len(prompts)
    assert {1, 16, 128, 129, 257} <= {len(prompt) for prompt in prompts}
    heads = [prompt[:300] for prompt in prompts if len(prompt) > 300]
    assert any(heads.count(head) >= 4 for head in heads)
