"""Where a command's output can be written, known before the command begins."""

from pathlib import Path

import pytest

from vllm_hybrid_sparse.cli.output_file import writable
from vllm_hybrid_sparse.errors import ConfigError


def test_a_file_or_a_link_to_one_in_a_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere" / "new")
    for path in (tmp_path / "new", link):
        assert writable("out", path) == path


@pytest.mark.parametrize("target", ["missing/new", ".", "link"])
def test_a_link_that_leads_nowhere_to_a_folder_or_to_itself_is_refused(target: str, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match=r"out=.*link: must be a file"):
        writable("out", link)
