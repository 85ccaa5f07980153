"""Documents are read, cut and scored."""

import json
from pathlib import Path

import pytest

from benchmarks.accuracy.documents import CUT_MARK, cut_in_the_middle, read_questions, rouge_l


def characters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def text_of(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_first_instructions_of_all_documents_come_first(tmp_path: Path) -> None:
    lines = [
        {"input": "doc one", "instructions": ["a1", "a2 "], "outputs": ["r1", " r2"], "source": "x"},
        {"input": "doc two", "instructions": ["b1"], "outputs": ["s1"]},
    ]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n", encoding="utf-8")
    asked = [(one.document, one.instruction, one.reference) for one in read_questions(path)]
    assert asked == [("doc one", "a1", "r1"), ("doc two", "b1", "s1"), ("doc one", "a2", "r2")]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"input": "x"}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"other\.jsonl: every line needs"):
        read_questions(path)


def test_a_document_that_fits_is_left_whole() -> None:
    assert cut_in_the_middle("abcdef", 6, encode=characters, decode=text_of) == ("abcdef", 0)


@pytest.mark.parametrize("tokens", [20, 21])
def test_a_longer_one_keeps_both_ends(tokens: int) -> None:
    document = "".join(chr(100 + place) for place in range(50))
    text, cut = cut_in_the_middle(document, tokens, encode=characters, decode=text_of)
    head, tail = text.split(CUT_MARK)
    assert len(text) == tokens
    assert document.startswith(head)
    assert document.endswith(tail)
    assert 0 <= len(head) - len(tail) <= 1
    assert cut == 50 - len(head) - len(tail)


def test_too_short_a_room_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens=8: too few"):
        cut_in_the_middle("x" * 50, 8, encode=characters, decode=text_of)


def test_rouge_l_by_hand() -> None:
    assert rouge_l("the cat sat", "the cat sat") == 1.0
    assert rouge_l("dogs", "the cat sat") == 0.0
    # longest common subsequence "the cat": precision 2 of 2, recall 2 of 4
    assert abs(rouge_l("the cat", "the black cat sat") - 2 * 1 * 0.5 / 1.5) < 1e-9
