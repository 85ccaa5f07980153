"""A file is there whole or as it was before."""

from pathlib import Path

import pytest

from vllm_hybrid_sparse.whole_file import whole_file


def test_it_appears_when_it_is_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with whole_file(path) as scratch:
        scratch.write_text("new")
        assert not path.exists()
    assert [(left.name, left.read_text()) for left in tmp_path.iterdir()] == [("file", "new")]


@pytest.mark.parametrize("begun", [False, True])
def test_an_error_leaves_the_file_as_it_was_and_no_other(begun: bool, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def write() -> None:
        with whole_file(path) as scratch:
            if begun:
                scratch.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert [(left.name, left.read_text()) for left in tmp_path.iterdir()] == [("file", "before")]


def test_through_a_link_the_file_is_written_that_it_leads_to(tmp_path: Path) -> None:
    elsewhere, link = tmp_path / "elsewhere", tmp_path / "link"
    elsewhere.mkdir()
    link.symlink_to(elsewhere / "file")
    with whole_file(link) as scratch:
        scratch.write_text("new")
    assert link.is_symlink()
    assert [(left.name, left.read_text()) for left in elsewhere.iterdir()] == [("file", "new")]
