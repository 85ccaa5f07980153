"""The text in which facts are hidden, read from a file."""

from pathlib import Path

import pytest

from benchmarks.accuracy.haystacks import from_text, prose_or_text


def test_a_text_is_read_from_a_place_and_from_its_start_again(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("One. Two!\nThree?\n\nFour", encoding="utf-8")
    filler = prose_or_text(path)
    all_four = filler(4, 7)
    assert sorted(all_four) == ["Four", "One.", "Three?", "Two!"]
    assert filler(6, 7) == all_four + all_four[:2]
    assert filler(2, 7) == all_four[:2]
    assert len({filler(1, seed)[0] for seed in range(30)}) == 4


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text(" \n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"text=empty\.txt"):
        from_text(path)
