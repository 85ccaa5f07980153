"""Prompts with a needle are as long as asked, whatever text they are made of."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.accuracy.needle_prompts import make_needle_prompt


@pytest.fixture
def tokenizer() -> Tokenizer:
    """One token a word and a mark, none for blanks."""
    found = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    found.pre_tokenizer = Whitespace()
    return found


@pytest.mark.parametrize("line", ["a b c d\n", "a:\n        return b\n\n\n"])
def test_a_text_with_wide_gaps_is_long_enough_too(line: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(line * 600)
    prompt = make_needle_prompt(tokenizer, 1024, 0.5, 0, path)
    assert len(prompt.token_ids) == 1024


def test_a_text_that_is_too_short_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a b c d\n" * 30)
    with pytest.raises(ValueError, match=r"context_tokens=1024: the text has only 120 tokens"):
        make_needle_prompt(tokenizer, 1024, 0.5, 0, path)
