"""When a group has read enough."""

import numpy as np
import pytest
import torch

from vllm_hybrid_sparse.kernels.score.reference import log_unread_after
from vllm_hybrid_sparse.runtime.readings import Reading, kept_share
from vllm_hybrid_sparse.values import GroupKey


def reading(pages: int, **changes: object) -> Reading:
    given: dict[str, object] = {
        "group": GroupKey(0, 0),
        "pages": tuple(range(3, 3 + pages)),
        "seq_len": 16 * (3 + pages),
        "microbatch_pages": 4,
    }
    return Reading(**(given | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("pages", "sizes"), [(0, []), (1, [1]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1])])
def test_pages_are_cut_into_microbatches(pages: int, sizes: list[int]) -> None:
    made = reading(pages)
    cut = [made.microbatch(index) for index in range(made.microbatches)]
    assert [len(part) for part in cut] == sizes
    assert [page for part in cut for page in part] == list(made.pages)
    assert made.microbatch(made.microbatches) == ()


def test_only_the_last_page_of_a_request_may_be_short() -> None:
    assert reading(5, seq_len=16 * 7 + 1).page_tokens(0) == [16, 16, 16, 16]
    assert reading(5, seq_len=16 * 7 + 1).page_tokens(1) == [1]


def test_an_unread_page_weighs_as_much_as_the_lightest() -> None:
    made = reading(6, candidates=10)
    lightest = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(made.log_rest(0, lightest), lightest + np.log(6))
    torch.testing.assert_close(made.log_rest(1, lightest), lightest + np.log(4))
    assert reading(6, candidates=6).log_rest(1, lightest).tolist() == [-torch.inf, -torch.inf]


def test_estimates_say_what_each_microbatch_leaves() -> None:
    weights = np.log(np.array([[1.0, 5.0, 2.0, 4.0, 3.0], [1.0, 1.0, 1.0, 1.0, 6.0]]))
    left = log_unread_after(weights, np.array([1, 3, 4, 2, 0]), step=2)
    np.testing.assert_allclose(np.exp(left), [[6.0, 8.0], [1.0, 1.0], [0.0, 0.0]])
    of_some = log_unread_after(weights, np.array([3, 1, 2]), step=2)
    np.testing.assert_allclose(np.exp(of_some), [[6.0, 8.0], [4.0, 7.0]])
    made = reading(5, candidates=5, microbatch_pages=2, log_unread=left)
    torch.testing.assert_close(made.log_rest(0, torch.zeros(2)).double(), torch.tensor([6.0, 8.0]).double().log())
    assert made.log_rest(2, torch.zeros(2)).tolist() == [-torch.inf, -torch.inf]
    lightest = reading(5, candidates=5, microbatch_pages=2, log_unread=left, lightest_rest=True)
    torch.testing.assert_close(lightest.log_rest(0, torch.zeros(2)), torch.full((2,), 3.0).log())
    assert log_unread_after(np.zeros((2, 0)), np.empty(0, dtype=np.int64), step=2).shape == (0, 2)


def test_the_head_that_has_least_decides() -> None:
    lse, rest = torch.tensor([0.0, 3.0]).log(), torch.tensor([1.0, 1.0]).log()
    assert kept_share(lse, rest) == 0.0
    assert kept_share(torch.tensor([9.0, 3.0]).log(), rest) == pytest.approx(0.75)
    assert kept_share(torch.zeros(1), torch.tensor([-torch.inf])) == 1.0
    assert kept_share(torch.zeros(1), torch.tensor([torch.inf])) == 0.0
    assert kept_share(torch.tensor([-torch.inf]), torch.tensor([-torch.inf])) == 0.0
