"""When requests are sent."""

import itertools
import statistics

import pytest

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.load.arrivals import ClosedLoop, by_arrival, poisson, recorded, seed_of_round
from vllm_hybrid_sparse.load.requests import Request


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_gaps_are_exponential_with_the_rate_asked_for(seed: int) -> None:
    count, rate = 20_000, 4.0
    due_s = poisson(rate, count, seed).due_s
    gaps = [later - earlier for earlier, later in itertools.pairwise((0.0, *due_s))]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(1 / rate, rel=0.03)  # four standard errors
    assert statistics.stdev(gaps) == pytest.approx(mean, rel=0.05)
    assert sum(gap > mean for gap in gaps) / count == pytest.approx(0.3679, abs=0.014)  # 1 / e


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_counts_in_stretches_of_time_have_their_mean_as_variance(seed: int) -> None:
    due_s = poisson(10.0, 20_000, seed).due_s
    counts = [0] * int(due_s[-1])
    for at_s in due_s:
        if at_s < len(counts):
            counts[int(at_s)] += 1
    assert statistics.variance(counts) == pytest.approx(statistics.mean(counts), rel=0.15)


def test_same_seed_gives_the_same_times_and_another_seed_others() -> None:
    assert poisson(2.0, 50, 7) == poisson(2.0, 50, 7)
    assert poisson(2.0, 50, 7) != poisson(2.0, 50, 8)


def test_another_rate_stretches_the_same_pattern() -> None:
    slow, fast = poisson(0.5, 50, 7).due_s, poisson(2.0, 50, 7).due_s
    assert [at_s / 4 for at_s in slow] == pytest.approx(list(fast))


@pytest.mark.parametrize("count", [1, 2, 32, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_the_rate_offered_is_the_one_asked_for(count: int, seed: int) -> None:
    for rate in (0.3, 1.0, 4.0):
        due_s = poisson(rate, count, seed).due_s
        assert due_s[-1] == count / rate
        assert list(due_s) == sorted(due_s)
        assert len(set(due_s)) == count


def test_the_arrivals_before_the_last_are_spread_evenly() -> None:
    """A Poisson process whose last arrival is given has the others anywhere before it, each time as likely."""
    early = [at_s for seed in range(500) for at_s in poisson(1.0, 10, seed).due_s[:-1]]
    shares = [sum(low <= at_s < low + 2 for at_s in early) / len(early) for low in range(0, 10, 2)]
    assert shares == pytest.approx([0.2] * 5, abs=0.025)  # four standard errors


def test_rounds_of_adjacent_seeds_share_no_arrivals() -> None:
    drawn = {poisson(1.0, 8, seed_of_round(seed, number)).due_s for seed in range(4) for number in range(4)}
    assert len(drawn) == 16
    assert seed_of_round(0, 1) == seed_of_round(0, 1)


def test_no_requests_have_no_times() -> None:
    assert poisson(1.0, 0, 0).due_s == ()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"rate=.*: must be above 0"):
        poisson(rate, 1, 0)


def test_no_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match="clients=0: must be at least 1"):
        ClosedLoop(0)


def _at(*times: float | None) -> list[Request]:
    return [Request(prompt="a", max_tokens=1, arrival_s=at_s) for at_s in times]


def test_recorded_times_are_kept_and_sped_up() -> None:
    assert recorded(_at(0.0, 1.0, 1.0, 4.0)).due_s == (0.0, 1.0, 1.0, 4.0)
    assert recorded(_at(0.0, 1.0, 4.0), speed=2.0).due_s == (0.0, 0.5, 2.0)


def test_a_trace_that_begins_late_is_sent_from_its_first_request_on() -> None:
    assert recorded(_at(18000.0, 18001.0, 18004.0), speed=2.0).due_s == (0.0, 0.5, 2.0)


def test_traces_that_are_merged_keep_their_times_to_each_other() -> None:
    late, later = _at(100.0, 103.0), _at(101.0, 102.0)
    assert recorded(by_arrival([later, late])).due_s == (0.0, 1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("times", "said"), [((0.0, None), "request 1 .* has no arrival_s"), ((2.0, 1.0), "request 1 .* in front of it")]
)
def test_recorded_times_that_are_missing_or_go_back_are_refused(times: tuple[float | None, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        recorded(_at(*times))


def test_speed_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="speed=0: must be above 0"):
        recorded(_at(0.0), speed=0)
