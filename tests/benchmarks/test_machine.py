"""Results say how they were made, but not where."""

import pytest

from benchmarks.machine import without_places


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("/data/texts/a.txt", "a.txt"),
        ("--text=/data/a.txt", "--text=a.txt"),
        ("/data/a.txt,/data/b.txt", "a.txt,b.txt"),
        ("/data/texts/", "texts/"),
        ("--cases", "--cases"),
        ("8Kx1,32Kx1", "8Kx1,32Kx1"),
        ("results/a.json", "results/a.json"),
    ],
)
def test_absolute_paths_are_cut_to_their_names(argument: str, kept: str) -> None:
    assert without_places(argument) == kept
