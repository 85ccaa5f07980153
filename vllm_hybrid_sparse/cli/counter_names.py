"""The names that our counters have in a server's /metrics, by the field of `DecodeStats` or `TierStats` they count."""

from vllm_hybrid_sparse.glue.metric_families import COUNTERS

COUNTER_NAMES = {family.field: family.name for family in COUNTERS}
