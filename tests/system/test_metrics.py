"""What /metrics says of known requests: served by one API server, by two, and where the backend is not selected."""

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from tests.system.completions import complete, metric
from tests.system.test_families import byte_prompts
from tests.system.tiny_models import make_tiny_model
from tests.system.variants import START_TIMEOUT_S, our_args, server_env, stock_args
from vllm_hybrid_sparse.cli.server import Server
from vllm_hybrid_sparse.glue.metric_families import COUNTERS, DEVICE_COUNTERS, PREFIX
from vllm_hybrid_sparse.load.prometheus import total
from vllm_hybrid_sparse.values import summary_bytes

LAYERS, KV_HEADS, HEAD_DIM, ELEMENT_BYTES = 3, 2, 128, 4  # of the tiny model, in fp32
PAGE_BYTES = 2 * 16 * HEAD_DIM * ELEMENT_BYTES
SUMMARY_BYTES = summary_bytes("key_codes", HEAD_DIM, ELEMENT_BYTES, 2)
SINK_PAGES, WINDOW_TOKENS, TOPK_PAGES = 4, 256, 3
ANSWER_TOKENS = 9
KV_CACHE_BYTES = 64 << 20
PROMPTS = [prompt for prompt in byte_prompts(seed=3) if len(prompt) >= 100]
SELECTED = [
    *stock_args("float32", 2048, KV_CACHE_BYTES),
    *our_args(policy="topk", topk_pages=TOPK_PAGES, log_interval_s=0.001),
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--served-model-name=tiny",
]


def expected_counters(prompts: list[list[int]]) -> dict[str, float]:
    """The counters by their field after each prompt was answered once with ANSWER_TOKENS tokens."""
    # An answer's first token comes with the prompt's last step, and its last one is never attended.
    lengths = [len(prompt) + token for prompt in prompts for token in range(1, ANSWER_TOKENS)]
    pages = [-(-length // 16) for length in lengths]
    candidates = [max(0, max(0, length - WINDOW_TOKENS) // 16 - SINK_PAGES) for length in lengths]
    skipped = [max(0, count - TOPK_PAGES) for count in candidates]
    scored = [count for count in candidates if count > TOPK_PAGES]
    times = LAYERS * KV_HEADS
    return {
        "rows": len(lengths),
        "selections": times * len(lengths),
        "pages_total": times * sum(pages),
        "pages_read": times * (sum(pages) - sum(skipped)),
        "pages_shared": 0,
        "pages_wasted": 0,
        "total_bytes": times * sum(pages) * PAGE_BYTES,
        "read_bytes": times * ((sum(pages) - sum(skipped)) * PAGE_BYTES + sum(scored) * SUMMARY_BYTES),
        "summary_bytes": times * sum(scored) * SUMMARY_BYTES,
        "early_stops": 0,
        "judged": 0,
        "kept_mass": 0,
        "microbatches": 0,
        "streaming": 0,
        "anchor_bytes": 0,
    }


def device_counters(exposition: str) -> dict[str, float]:
    found = {family.field: total(exposition, family.name) for family in DEVICE_COUNTERS}
    return {field: value for field, value in found.items() if value is not None}


def counters(exposition: str) -> dict[str, float | None]:
    return {family.field: total(exposition, family.name) for family in COUNTERS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model that all servers here serve."""
    return make_tiny_model("llama-gqa", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One API server."""
    log_path = tmp_path_factory.mktemp("one") / "server.log"
    with Server(model, SELECTED, server_env(), log_path) as running:
        running.wait_ready(START_TIMEOUT_S)
        yield running


def test_counters_are_known_before_the_first_request_and_are_what_was_read(server: Server) -> None:
    assert set(counters(server.metrics()).values()) == {0.0}
    assert max(expected_counters(PROMPTS).values()) > min(expected_counters(PROMPTS).values()) == 0
    complete(named(server), PROMPTS, ANSWER_TOKENS, concurrency=3)
    assert counters(server.metrics()) == expected_counters(PROMPTS)
    assert not device_counters(server.metrics()), "there is no device"
    host_kv_bytes = metric(server, f"{PREFIX}host_kv_bytes")
    assert 0.9 * KV_CACHE_BYTES < host_kv_bytes <= KV_CACHE_BYTES


def test_settings_in_effect_are_labels(server: Server) -> None:
    (info,) = [line for line in server.metrics().splitlines() if line.startswith(f"{PREFIX}settings_info{{")]
    assert 'model_name="tiny"' in info
    assert f'topk_pages="{TOPK_PAGES}"' in info
    assert info.endswith(" 1.0")


def test_the_log_says_the_same_for_a_person(server: Server) -> None:
    complete(named(server), PROMPTS[:1], ANSWER_TOKENS, concurrency=1)
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    lines = [line.partition("hybrid_sparse: ")[2] for line in log.splitlines() if "hybrid_sparse: decoded" in line]
    assert lines
    assert all(line.startswith("decoded ") and "% of their KV cache" in line for line in lines)


def test_two_api_servers_expose_one_sum_and_count_a_device(model: Path, tmp_path: Path) -> None:
    """Whichever of the two answers, its figures are the sums over both; and both did count.

    The sums are those of a server without a device. In addition, the pool was asked for what decoding read, every page
    was there or copied, and the host took some groups.
    """
    kept = tmp_path / "prometheus"
    kept.mkdir()
    env = {**server_env(), "PROMETHEUS_MULTIPROC_DIR": str(kept)}
    device = our_args(policy="topk", topk_pages=TOPK_PAGES, device="emulated", host_share="uniform")
    args = [*SELECTED, *device, "--api-server-count=2"]
    expected = expected_counters(PROMPTS * 3)
    with Server(model, args, env, tmp_path / "server.log") as two:
        two.wait_ready(START_TIMEOUT_S)
        for prompt in PROMPTS:  # a connection each: the kernel deals them out to both
            complete(named(two), [prompt] * 3, ANSWER_TOKENS, concurrency=1)
        expositions = [two.metrics() for _ in range(6)]
        assert [counters(exposition) for exposition in expositions] == [expected] * len(expositions)
        assert {metric(two, f"{PREFIX}host_kv_bytes") for _ in range(6)} == {seen_by_one(two)}
        sums = device_counters(expositions[0])
        assert all(device_counters(exposition) == sums for exposition in expositions)
        assert sums["pages_wanted"] + sums["pages_on_host"] == expected["pages_read"]
        assert sums["pages_hit"] + sums["pages_fetched"] == sums["pages_wanted"]
        assert 0 < sums["pages_fetched"] < sums["pages_hit"]
        assert 0 < sums["groups_on_host"] < expected["selections"]
        assert 0 < sums["pages_on_host"] <= TOPK_PAGES * sums["groups_on_host"]
        assert 0 < sums["device_busy_s"] < sums["step_s"]
        assert 0 < sums["host_busy_s"] < sums["step_s"]
        assert sums["failed_loads"] == 0
        each = [rows_counted_by(file, tmp_path) for file in sorted(kept.glob("counter_*.db"))]
        assert sum(rows > 0 for rows in each) == 2, each


def seen_by_one(server: Server) -> float:
    value = metric(server, f"{PREFIX}host_kv_bytes")
    assert value > 0
    return value


def rows_counted_by(file: Path, tmp_path: Path) -> float:
    """Rows that one process counted, from the file that it keeps them in."""
    alone = tmp_path / file.stem
    alone.mkdir()
    (alone / file.name).write_bytes(file.read_bytes())
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(alone))
    return total(generate_latest(registry).decode(), f"{PREFIX}decode_rows_total") or 0.0


def test_where_the_backend_is_not_selected_nothing_appears_and_nothing_changes(model: Path, tmp_path: Path) -> None:
    """`--disable-log-stats` keeps its meaning, too: an installed stat logger plugin would defeat it."""
    args = [*stock_args("float32", 2048, KV_CACHE_BYTES), "--enforce-eager", "--disable-log-stats"]
    with Server(model, args, server_env(), tmp_path / "server.log") as stock:
        stock.wait_ready(START_TIMEOUT_S)
        complete(stock, PROMPTS[:1], ANSWER_TOKENS, concurrency=1)
        text = stock.metrics()
        assert PREFIX not in text
        assert "vllm:" not in text
        assert "hybrid_sparse:" not in stock.log_path.read_text(encoding="utf-8", errors="replace")


def named(server: Server) -> Server:
    """The same server, under the model name that requests to it give."""
    same = Server("tiny", [], {}, server.log_path, port=server.port)
    assert urllib.request.urlopen(f"{same.base_url}/models", timeout=10).status == 200
    return same
