"""What a server holds while nobody asks anything: processes, pages and counters."""

from dataclasses import dataclass

import psutil

from vllm_hybrid_sparse.load.prometheus import total

WORKER, ENGINE, API = "worker", "engine", "api server"
JUDGED = (WORKER, ENGINE)

_PREFIX = "vllm_hybrid_sparse_"
COUNTERS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_count",
    f"{_PREFIX}decode_rows_total",
    f"{_PREFIX}selections_total",
    f"{_PREFIX}context_pages_total",
    f"{_PREFIX}read_pages_total",
    f"{_PREFIX}judged_selections_total",
    f"{_PREFIX}kept_mass_total",
    f"{_PREFIX}early_stops_total",
    f"{_PREFIX}packed_bytes",
    f"{_PREFIX}host_kv_bytes",
)
IDLE = COUNTERS[:3]  # these are 0 if nothing runs


@dataclass(frozen=True, slots=True)
class Process:
    """One process of the server."""

    resident_bytes: int
    threads: int
    files: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Reading:
    """The server at rest, `awake_s` after the load began."""

    awake_s: float
    processes: dict[str, Process]
    counters: dict[str, float]


def role(title: str) -> str | None:
    """Return whose command line this is; None for helpers such as the resource tracker."""
    if "Worker" in title:
        return WORKER
    if "EngineCore" in title:
        return ENGINE
    return API if "serve" in title else None


def read_processes() -> dict[str, Process]:
    """Return the processes of the one server that this process has started, by role."""
    found: dict[str, Process] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            name = role(" ".join(process.cmdline()))
            if name is None:
                continue
            with process.oneshot():
                cpu = process.cpu_times()
                found[name] = Process(
                    process.memory_info().rss, process.num_threads(), process.num_fds(), cpu.user + cpu.system
                )
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def read_counters(exposition: str) -> dict[str, float]:
    """Return the counters of an exposition that are judged; missing ones are left out."""
    return {name: value for name in COUNTERS if (value := total(exposition, name)) is not None}
