"""What `gpu_timing` computes from the times at which tokens came, and from the sides' rounds."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.gpu_timing import SIDES, engine_arguments, fitting, parse_arguments, side_arguments, write_config
from benchmarks.gpu_timing_rows import Case, counters, differences, parse_case, summarise, table, together, whole_round
from benchmarks.kv_shape import KVShape, read_shape
from vllm_hybrid_sparse.config import HybridSparseConfig


def test_only_the_time_in_which_all_requests_decode_is_counted() -> None:
    """One begins about 10 s late. The other ends about 10 s early, and is faster before both run."""
    early = [(0.1 * token, token) for token in range(1, 100)] + [(10.0 + token, 99 + token) for token in range(21)]
    late = [(10.0 + 0.5 * token, token) for token in range(1, 60)]
    figures = together([early, late])
    assert figures["tokens_per_s"] == pytest.approx(1 + 2)
    assert figures["step_ms"] == pytest.approx(1e3 * (1 + 0.5) / 2)


def test_requests_one_after_another_are_no_measurement() -> None:
    one = [(1.0 * token, token) for token in range(1, 9)]
    with pytest.raises(ValueError, match="side by side"):
        together([one, [(20.0 + token, token) for token in range(1, 9)]])


def test_a_whole_round_counts_from_its_beginning_to_its_last_token() -> None:
    came = [[(11.0, 1), (12.0, 8)], [(13.0, 1), (20.0, 12)]]
    assert whole_round(came, 10.0) == {"round_tokens_per_s": 2.0}


def test_sides_are_compared_by_what_both_have() -> None:
    """If requests ran one after another with offloading, there is no time between tokens of all of them."""
    timed = {"round_tokens_per_s": 50.0, "step_ms": 10.0, "tokens_per_s": 99.0}
    rounds = [{"side": "offload", "round_tokens_per_s": 20.0}, {"side": "baseline", **timed}]
    offload, baseline = summarise([{"case": "8Kx2", "round": 1, **row} for row in rounds])
    assert offload == {"case": "8Kx2", "side": "offload", "round_tokens_per_s": 20.0, "this_over_offload": 1.0}
    assert (baseline["this_over_offload"], baseline["baseline_over_this"]) == (2.5, 1.0)
    assert len(table([offload, baseline], "FLASH_ATTN").splitlines()) == 4


def test_what_a_trace_says_stands_beside_the_rounds_and_is_none_of_them() -> None:
    timed = {"case": "8Kx1", "side": "ranked", "step_ms": 10.0}
    (row,) = summarise([{**timed, "round": 1}, {"case": "8Kx1", "side": "ranked", "round": 0, "traced_idle": 0.25}])
    assert row == {**timed, "traced_idle": 0.25}
    assert "25%" in table([row], "FLASH_ATTN")


def test_offloading_goes_through_the_cases_of_which_a_request_fits(tmp_path: Path) -> None:
    options = parse_arguments(["--device-gib", "0.5", "--cases", "8Kx32,32Kx4,128Kx1"])
    options.folder = tmp_path
    write_config(tmp_path, layers=3, hidden=512)  # 12 KiB a token, so 43690 tokens
    assert [case.name for case in fitting(options, options.parsed)] == ["8Kx32", "32Kx4"]
    options.device_gib = 0.01
    with pytest.raises(ValueError, match=r"--device-gib=0.01: holds 873 tokens, fewer than any case has"):
        fitting(options, options.parsed)


def test_shares_are_of_what_a_round_has_added() -> None:
    def exposition(scale: int) -> str:
        names = {
            "context_bytes": 100, "read_bytes": 20, "device_step_seconds": 8, "device_busy_seconds": 2,
            "device_wanted_pages": 10, "device_hit_pages": 9,
        }  # fmt: skip
        return "\n".join(f"vllm_hybrid_sparse_{name}_total {scale * value}" for name, value in names.items())

    before, after = counters(exposition(1)), counters(exposition(3))
    assert differences(before, after) == pytest.approx({"kv_read": 0.2, "hit_rate": 0.9, "device_idle": 0.75})
    assert differences({}, counters("")) == {}
    failed = counters("vllm_hybrid_sparse_device_failed_loads_total 3")
    assert differences(failed, failed) == {}  # failures of an earlier round
    with pytest.raises(RuntimeError, match="3 loads to the device failed"):
        differences({}, failed)


def test_ratios_are_of_medians_without_the_first_round() -> None:
    steps = {
        "baseline": [9.0, 4.0, 5.0, 6.0],
        "fixed": [99.0, 20.0, 20.0, 20.0],
        "hybrid": [9.0, 30.0, 30.0, 30.0],
        "topk": [50.0, 10.0, 10.0, 11.0],
    }
    rounds = [
        {"side": side, "case": "8Kx2", "round": number, "step_ms": step, "tokens_per_s": 2e3 / step}
        for side, values in steps.items()
        for number, step in enumerate(values)
    ]
    rows = {row["side"]: row for row in summarise(rounds)}
    assert rows["topk"]["baseline_over_this"] == 0.5
    assert rows["topk"]["fixed_over_this"] == 2.0
    assert rows["topk"]["hybrid_over_this"] == 3.0
    assert rows["baseline"]["step_ms"] == 5.0
    assert "fixed_over_this" not in summarise(rounds[:4])[0]
    assert len(table(list(rows.values()), "FLASH_ATTN").splitlines()) == 6


@pytest.mark.parametrize("name", ["", "8K", "Kx1", "0Kx1", "8Kx0", "8x1", "8Kx1.5"])
def test_a_case_that_is_none_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--cases", name])
    assert f"--cases={name}: must be a context in K tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ("--tokens=1", "must be at least 2"),  # one token has no time between tokens
        ("--rounds=0", "must be at least 1"),
        ("--side-timeout=0", "must be at least 1"),
        ("--device-gib=0", "must be above 0"),
        ("--sides=best", "must be among baseline, "),
    ],
)
def test_a_setting_that_measures_nothing_is_refused(wrong: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments([wrong])
    assert f"{wrong}: {rule}" in capsys.readouterr().err


def test_a_case_has_its_name() -> None:
    assert parse_case("32Kx4") == Case(context_tokens=32768, requests=4)
    assert parse_case("32Kx4").name == "32Kx4"


def test_the_hybrid_and_psa_are_the_papers(tmp_path: Path) -> None:
    """Fluxion's baseline: blocks of 16, 5 % a head, all of it on the host. PSA: its summary, rule and eviction."""
    options = parse_arguments(["--device-gib", "0.5"])
    options.folder, options.rows = tmp_path, tmp_path / "rows.jsonl"
    write_config(tmp_path, layers=3, hidden=512)
    common = engine_arguments(options, options.parsed)
    hybrid, psa = (
        HybridSparseConfig.from_mapping(side_arguments(side, options, common)["additional_config"]["hybrid_sparse"])
        for side in ("hybrid", "psa")
    )
    assert (hybrid.policy, hybrid.granularity, hybrid.summary) == ("fluxion", 16, "minmax")
    assert (hybrid.host_share, hybrid.sink_tokens, hybrid.window_tokens) == ("all", 64, 256)
    assert hybrid.predictor is not None
    assert load_file(hybrid.predictor)["target_mean"].tolist() == pytest.approx([0.05, 0.0])
    assert (psa.policy, psa.threshold, psa.summary, psa.remainder) == (
        "progressive",
        0.95,
        "cuboid_mean",
        "lightest_page",
    )
    assert (psa.device_eviction, psa.device_ranking, psa.host_share) == ("lru", "host", "none")
    assert (psa.device_pool, psa.device_resident_share, psa.admission) == ("unified", 0, "working_set")


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("device", ["cuda", "emulated", "none"])
def test_every_side_is_legal_and_has_the_pool_that_was_asked_for(side: str, device: str, tmp_path: Path) -> None:
    options = parse_arguments(["--device", device, "--device-gib", "0.5"])
    options.folder, options.rows = tmp_path, tmp_path / "rows.jsonl"
    write_config(tmp_path, layers=3, hidden=512)
    assert read_shape(tmp_path) == KVShape(layers=3, kv_heads=8, head_dim=128)
    common = engine_arguments(options, options.parsed)
    arguments = side_arguments(side, options, common)
    if side == "baseline":
        assert arguments == {"attention_backend": "FLASH_ATTN"}
        return
    if side == "offload":
        assert (arguments["attention_backend"], arguments["kv_cache_memory_bytes"]) == ("FLASH_ATTN", 2**29)
        connectors = arguments["kv_transfer_config"]["kv_connector_extra_config"]["connectors"]
        assert [one["kv_connector"] for one in connectors] == ["OffloadingConnector", "DecodeBenchConnector"]
        host_bytes = connectors[0]["kv_connector_extra_config"]["cpu_bytes_to_use"]
        assert host_bytes == common["kv_cache_memory_bytes"] > 131072 * 4 * 12288  # 12288 bytes a token
        return
    settings = HybridSparseConfig.from_mapping(arguments["additional_config"]["hybrid_sparse"])
    assert settings.device == device
    assert (settings.predictor is not None) == (side in ("fluxion", "hybrid"))
    assert settings.device_pool_pages == (None if device == "none" else 2**29 // (2 * 16 * 128 * 2))
