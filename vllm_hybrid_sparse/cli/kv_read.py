"""How much of the KV cache a server's decoding has read, from the text of its /metrics."""

from vllm_hybrid_sparse.glue.metric_families import COUNTERS
from vllm_hybrid_sparse.load.prometheus import total

_NAMES = {family.field: family.name for family in COUNTERS}


def share_of_kv_read(exposition: str) -> float | None:
    """Bytes read over those that full attention would have read, since the server began.

    None where the backend is not selected, or where nothing was decoded.
    """
    read, full = (total(exposition, _NAMES[field]) for field in ("read_bytes", "total_bytes"))
    return read / full if read is not None and full else None
