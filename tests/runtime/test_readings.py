"""When a group has read enough."""

import numpy as np
import pytest
import torch

from vllm_hybrid_sparse.kernels.score.reference import log_unread_after
from vllm_hybrid_sparse.runtime.readings import Reading, ReadingWave, kept_share
from vllm_hybrid_sparse.values import GroupKey


def reading(pages: int, **changes: object) -> Reading:
    given: dict[str, object] = {
        "group": GroupKey(0, 0),
        "pages": np.arange(3, 3 + pages),
        "seq_len": 16 * (3 + pages),
        "microbatch_pages": 4,
    }
    return Reading(**(given | changes))  # type: ignore[arg-type]


def round_sizes(wave: ReadingWave) -> list[list[int]]:
    """Pages of each round, by reading."""
    return [wave.round_lengths(index).tolist() for index in range(wave.rounds)]


@pytest.mark.parametrize(("pages", "sizes"), [(0, []), (1, [1]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1])])
def test_a_look_comes_after_every_microbatch_where_nothing_is_known(pages: int, sizes: list[int]) -> None:
    wave = ReadingWave.of([reading(pages, threshold=0.9)])
    assert round_sizes(wave) == [[size] for size in sizes]
    assert [page for index in range(wave.rounds) for page in wave.round_pages(0, index)] == list(range(3, 3 + pages))


@pytest.mark.parametrize(
    ("expected", "sizes"), [(4, [4, 4, 4, 2]), (8, [8, 4, 2]), (12, [12, 2]), (14, [14]), (0, [4, 4, 4, 2])]
)
def test_the_first_round_is_what_is_expected_to_be_enough(expected: int, sizes: list[int]) -> None:
    assert round_sizes(ReadingWave.of([reading(14, threshold=0.9, expected=expected)])) == [[size] for size in sizes]


def test_rounds_are_cut_to_the_room_that_two_of_them_have() -> None:
    with_threshold = [
        reading(14, threshold=0.9, expected=12),
        reading(9, group=GroupKey(0, 1), threshold=0.9, expected=4),
    ]
    assert round_sizes(ReadingWave.of(with_threshold, room_pages=16)) == [[4, 4], [4, 4], [4, 1], [2, 0]]
    assert round_sizes(ReadingWave.of(with_threshold, room_pages=35)) == [[8, 4], [4, 4], [2, 1]]
    assert round_sizes(ReadingWave.of(with_threshold)) == [[12, 4], [2, 4], [0, 1]]
    whole = [reading(14), reading(9, group=GroupKey(0, 1))]
    assert round_sizes(ReadingWave.of(whole, room_pages=32)) == [[8, 8], [6, 1]]
    assert round_sizes(ReadingWave.of(whole)) == [[14, 9]]


def test_a_wave_has_its_readings_side_by_side() -> None:
    wave = ReadingWave.of([reading(5, group=GroupKey(2, 1)), reading(3), reading(0, group=GroupKey(0, 1))], 24)
    assert (wave.rows.tolist(), wave.kv_heads.tolist(), wave.lengths.tolist()) == ([2, 0, 0], [1, 0, 1], [5, 3, 0])
    assert wave.pages.tolist() == [[3, 4, 5, 6, 7], [3, 4, 5, -1, -1], [-1] * 5]
    assert wave.rounds == 2
    assert wave.of_round(wave.pages, 0, -1).tolist() == [[3, 4, 5, 6], [3, 4, 5, -1], [-1] * 4]
    assert wave.of_round(wave.pages, 1, -1).tolist() == [[7], [-1], [-1]]


def test_readings_may_be_at_different_places_in_a_round() -> None:
    wave = ReadingWave.of(
        [reading(9, threshold=0.9, expected=8), reading(9, group=GroupKey(0, 1), threshold=0.9, expected=4)]
    )
    assert wave.of_round(wave.pages, 1, -1).tolist() == [[11, -1, -1, -1], [7, 8, 9, 10]]
    assert wave.of_round(wave.pages, 2, -1).tolist() == [[-1], [11]]


def test_readings_of_two_thresholds_are_no_wave() -> None:
    with pytest.raises(AssertionError, match="the readings of a wave have one threshold"):
        ReadingWave.of([reading(5), reading(5, threshold=0.5)])


def test_only_the_last_page_of_a_request_may_be_short() -> None:
    wave = ReadingWave.of([reading(5, seq_len=16 * 7 + 1), reading(3)])
    assert wave.page_tokens.tolist() == [[16, 16, 16, 16, 1], [16, 16, 16, 0, 0]]


def test_an_unread_page_weighs_as_much_as_the_lightest() -> None:
    made = reading(6, candidates=10)
    lightest = torch.tensor([1.0, 2.0])
    torch.testing.assert_close(made.log_rest(4, lightest), lightest + np.log(6))
    torch.testing.assert_close(made.log_rest(6, lightest), lightest + np.log(4))
    assert reading(6, candidates=6).log_rest(6, lightest).tolist() == [-torch.inf, -torch.inf]


def test_estimates_say_what_each_microbatch_leaves() -> None:
    weights = np.log(np.array([[1.0, 5.0, 2.0, 4.0, 3.0], [1.0, 1.0, 1.0, 1.0, 6.0]]))
    left = log_unread_after(weights, np.array([1, 3, 4, 2, 0]), step=2)
    np.testing.assert_allclose(np.exp(left), [[6.0, 8.0], [1.0, 1.0], [0.0, 0.0]])
    of_some = log_unread_after(weights, np.array([3, 1, 2]), step=2)
    np.testing.assert_allclose(np.exp(of_some), [[6.0, 8.0], [4.0, 7.0]])
    made = reading(5, candidates=5, microbatch_pages=2, log_unread=left)
    torch.testing.assert_close(made.log_rest(2, torch.zeros(2)).double(), torch.tensor([6.0, 8.0]).double().log())
    assert made.log_rest(5, torch.zeros(2)).tolist() == [-torch.inf, -torch.inf]
    lightest = reading(5, candidates=5, microbatch_pages=2, log_unread=left, lightest_rest=True)
    torch.testing.assert_close(lightest.log_rest(2, torch.zeros(2)), torch.full((2,), 3.0).log())
    assert log_unread_after(np.zeros((2, 0)), np.empty(0, dtype=np.int64), step=2).shape == (0, 2)


def test_the_head_that_has_least_decides() -> None:
    lse, rest = torch.tensor([0.0, 3.0]).log(), torch.tensor([1.0, 1.0]).log()
    assert kept_share(lse, rest) == 0.0
    assert kept_share(torch.tensor([9.0, 3.0]).log(), rest) == pytest.approx(0.75)
    assert kept_share(torch.zeros(1), torch.tensor([-torch.inf])) == 1.0
    assert kept_share(torch.zeros(1), torch.tensor([torch.inf])) == 0.0
    assert kept_share(torch.tensor([-torch.inf]), torch.tensor([-torch.inf])) == 0.0
