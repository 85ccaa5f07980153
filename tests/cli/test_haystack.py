"""The text of the demo: its length, what is hidden in it, and that it can be made again."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from vllm_hybrid_sparse.cli.haystack import Fact, make_haystack
from vllm_hybrid_sparse.cli.prose import prose

DEPTHS = (0.3, 0.6, 0.9)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that makes one token of every word and sign."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("tokens", [200, 1000, 7000])
def test_text_fills_its_budget_and_never_exceeds_it(tokenizer_file: Path, tokens: int) -> None:
    haystack = make_haystack(tokenizer_file, tokens, DEPTHS, seed=0)
    assert tokens - 60 <= haystack.tokens <= tokens


def test_each_fact_is_hidden_once_where_it_was_asked_for(tokenizer_file: Path) -> None:
    haystack = make_haystack(tokenizer_file, 4000, DEPTHS, seed=3)
    for fact, depth in zip(haystack.facts, DEPTHS, strict=True):
        assert haystack.text.count(fact.sentence) == 1
        assert haystack.text.index(fact.sentence) / len(haystack.text) == pytest.approx(depth, abs=0.03)
        assert haystack.text.count(fact.number) == 1


def test_same_seed_gives_the_same_text_and_another_seed_another(tokenizer_file: Path) -> None:
    first, again, other = (make_haystack(tokenizer_file, 1000, DEPTHS, seed) for seed in (5, 5, 6))
    assert first == again
    assert first.text != other.text


def test_prose_has_no_digits_and_varies() -> None:
    sentences = prose(500, seed=0)
    assert not any(character.isdigit() for sentence in sentences for character in sentence)
    assert len(set(sentences)) > 490


@pytest.mark.parametrize(("answer", "found"), [(" 48213.", True), (" 48214.", False), ("", False)])
def test_fact_is_found_only_by_its_number(answer: str, found: bool) -> None:
    assert Fact("castle", "48213").found_in(answer) is found
