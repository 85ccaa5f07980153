"""The backend's metrics on vLLM's /metrics: their names, their kinds and what they mean.

Names and units follow Prometheus: base units, counters end in `_total`. Every series has the labels `model_name` and
`engine`, as vLLM's own have.
"""

from dataclasses import dataclass

PREFIX = "vllm_hybrid_sparse_"
LABELS = ("model_name", "engine")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    name: str  # as it is exposed
    field: str  # of `DecodeStats` for counters, `TierStats` for device counters, `WorkerReport` for gauges
    help: str


COUNTERS = tuple(
    Family(f"{PREFIX}{name}_total", field, text)
    for name, field, text in (
        ("decode_rows", "rows", "Query tokens attended alone: one of a request in a step, and its drafts."),
        ("selections", "selections", "Choices of what to read: one a decode row, KV head and layer."),
        ("context_pages", "pages_total", "Pages (16 tokens of a KV head and layer) of decode rows' contexts."),
        (
            "read_pages",
            "pages_read",
            "Pages of those that were read: the retained set and what was selected; a common prefix once for all rows.",
        ),
        (
            "shared_pages",
            "pages_shared",
            "Pages attended to that another request's reading brought; not among those read.",
        ),
        ("wasted_pages", "pages_wasted", "Pages read ahead of a stop and dropped; not among those read."),
        ("context_bytes", "total_bytes", "K and V of decode rows' contexts: what full attention would read."),
        ("read_bytes", "read_bytes", "K and V read by decode rows, dropped pages and scored summaries included."),
        ("summary_read_bytes", "summary_bytes", "Summaries scored by decode rows; they are among the bytes read."),
        ("early_stops", "early_stops", "Selections that reached the threshold before their last candidate page."),
        ("judged_selections", "judged", "Selections with a threshold, and so with an estimate of the kept mass."),
        ("kept_mass", "kept_mass", "Sum over judged selections of the share of attention kept, by estimate, 0 to 1."),
        ("microbatches", "microbatches", "Looks at the threshold."),
        ("streaming_selections", "streaming", "Selections that Fluxion let read the retained set alone."),
        ("anchor_read_bytes", "anchor_bytes", "K and V read to observe Fluxion's anchors; not among the bytes read."),
    )
)

# Only with a device. Figures that a server without a device has too are counted above: pages wasted, microbatches,
# early stops and the mass kept.
DEVICE_COUNTERS = tuple(
    Family(f"{PREFIX}{name}_total", field, text)
    for name, field, text in (
        ("device_wanted_pages", "pages_wanted", "Pages that decode rows asked of the device pool."),
        ("device_hit_pages", "pages_hit", "Pages of those wanted that the device pool had."),
        ("device_fetched_pages", "pages_fetched", "Pages of those wanted that were copied from host memory."),
        (
            "device_evicted_pages",
            "pages_evicted",
            "Pages that made room for others in the device pool; where the device ranks pages it is not known, and 0.",
        ),
        (
            "device_resident_selections",
            "resident_groups",
            "Selections of requests all of whose blocks the device had; it read them whole and by itself.",
        ),
        ("device_ranked_selections", "ranked_groups", "Selections whose pages the device chose by itself."),
        ("device_entered_blocks", "blocks_entered", "Blocks of all layers that were copied to the device as wholes."),
        ("device_failed_loads", "failed_loads", "Loads for a selection that failed; the host attended their pages."),
        ("device_busy_seconds", "device_busy_s", "Time that the device attended."),
        ("host_busy_seconds", "host_busy_s", "Time that the host attended selections that it had taken."),
        ("device_step_seconds", "step_s", "Time that decode rows took on device and host, all layers."),
        ("host_selections", "groups_on_host", "Selections that the host took and attended beside the device."),
        ("host_pages", "pages_on_host", "Pages that the host attended for the selections that it had taken."),
    )
)

GAUGES = tuple(
    Family(f"{PREFIX}{name}", field, text)
    for name, field, text in (
        ("host_kv_bytes", "host_kv_bytes", "Host memory that holds the KV cache and its summaries."),
        (
            "packed_bytes",
            "packed_bytes",
            "Host memory that HGCA's packed copies of salient tokens held in the last step that decoded.",
        ),
    )
)

FALLBACKS_TOTAL = f"{PREFIX}fallbacks_total"  # only with a device; its label is a kind of `kernels/fallbacks.py`
FALLBACK_LABELS = ("kind",)

SETTINGS_INFO = f"{PREFIX}settings_info"  # 1; its labels are the settings in effect
HOST_INFO = f"{PREFIX}host_info"  # 1; its labels say what the settings became on the worker's machine
HOST_INFO_LABELS = ("isa", "threads", "thread_pool")


def exposed_names() -> frozenset[str]:
    """Every metric name that a dashboard or an alerting rule may use."""
    families = (*COUNTERS, *DEVICE_COUNTERS, *GAUGES)
    return frozenset({FALLBACKS_TOTAL, SETTINGS_INFO, HOST_INFO, *(family.name for family in families)})
