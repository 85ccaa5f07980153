"""A text is cut into whole windows. Each begins with the text's begin token, if it has one."""

import pytest
import torch

from benchmarks.accuracy.perplexity import split_windows


@pytest.mark.parametrize(
    ("text", "begin", "windows"),
    [
        ([5, 6, 7, 8, 9], None, [[5, 6], [7, 8]]),
        ([5, 6, 7, 8], 2, [[5, 6], [7, 8]]),
        ([2, 6, 7, 8], 2, [[2, 6], [2, 7], [2, 8]]),
        ([2], 2, []),
    ],
)
def test_windows_begin_as_the_text_does(text: list[int], begin: int | None, windows: list[list[int]]) -> None:
    assert [window.tolist() for window in split_windows(torch.tensor(text), begin, 2)] == windows
