"""Our figures and those of `vllm bench serve`, computed from the same times."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.serving.agreement import compare, definitions_differ, of_ours

PERCENTILES = [90.0, 99.0]


def noted_by_vllm(seed: int, requests: int) -> dict[str, Any]:
    """What `vllm bench serve --save-detailed` writes for made-up times, computed by its own code."""
    serve = pytest.importorskip("vllm.benchmarks.serve")
    outputs_of = pytest.importorskip("vllm.benchmarks.lib.endpoint_request_func")
    rng = np.random.default_rng(seed)
    outputs = []
    for number in range(requests):
        tokens = int(rng.integers(2, 40))
        # Tokens that come together count as one arrival, so there are fewer gaps than tokens.
        itl = [float(gap) for gap in rng.exponential(0.05, size=max(1, tokens - 1 - number % 3))]
        ttft = float(rng.exponential(0.4))
        outputs.append(
            outputs_of.RequestFuncOutput(
                generated_text="x", success=True, latency=ttft + sum(itl), output_tokens=tokens, ttft=ttft, itl=itl,
                prompt_len=100 + number, start_time=1e5 + number,
            )
        )  # fmt: skip
    duration = max(output.start_time + output.latency for output in outputs) - 1e5
    metrics, lengths = serve.calculate_metrics(
        input_requests=[SimpleNamespace(multi_modal_data=None)] * requests,
        outputs=outputs,
        dur_s=duration,
        tokenizer=None,
        selected_percentiles=PERCENTILES,
        goodput_config_dict={},
    )
    noted: dict[str, Any] = {
        "duration": duration,
        "request_throughput": metrics.request_throughput,
        "output_throughput": metrics.output_throughput,
        "start_times": [output.start_time for output in outputs],
        "ttfts": [output.ttft for output in outputs],
        "itls": [output.itl for output in outputs],
        "input_lens": [output.prompt_len for output in outputs],
        "output_lens": lengths,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        for part in ("mean", "median"):
            noted[f"{part}_{name}_ms"] = getattr(metrics, f"{part}_{name}_ms")
        noted |= {f"p{percent:g}_{name}_ms": value for percent, value in getattr(metrics, f"percentiles_{name}_ms")}
    return noted


@pytest.mark.parametrize("requests", [1, 2, 32])
def test_the_definitions_are_those_of_vllm(requests: int) -> None:
    assert definitions_differ(noted_by_vllm(seed=requests, requests=requests)) == {}


@pytest.mark.parametrize("name", ["p99_itl_ms", "median_tpot_ms", "mean_ttft_ms", "output_throughput"])
def test_a_figure_that_is_made_otherwise_is_named(name: str) -> None:
    noted = noted_by_vllm(seed=5, requests=12)
    noted[name] *= 1.001
    assert set(definitions_differ(noted)) == {name}


def test_clients_are_compared_by_their_median_rounds() -> None:
    times = {"mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
    ours = dict.fromkeys(("ttft_s", "tpot_s", "tbt_s", "e2e_s"), times) | {
        "requests_per_s": 2.0,
        "output_tokens_per_s": 3.0,
    }
    theirs = [dict.fromkeys(of_ours(ours), value) for value in (4000.0, 500.0, 1.0)]
    rows = {row["figure"]: row["ratio"] for row in compare(theirs, [ours] * 3)}
    assert rows["median_ttft_ms"] == pytest.approx(2.0)
    assert rows["request_throughput"] == pytest.approx(2.0 / 500.0)
    assert len(rows) == 18
    (ratio,) = {row["ratio"] for row in compare(theirs[:2], [ours] * 2) if row["figure"] == "median_ttft_ms"}
    assert ratio == pytest.approx(1000.0 / 2250.0)
