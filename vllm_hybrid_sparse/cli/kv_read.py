"""How much of the KV cache a server's decoding has read, from the text of its /metrics."""

from vllm_hybrid_sparse.cli.counter_names import COUNTER_NAMES
from vllm_hybrid_sparse.load.prometheus import total


def kv_bytes(exposition: str) -> tuple[float, float] | None:
    """Bytes read since the server started, and bytes that full attention would have read.

    None if the backend is not selected.
    """
    read, full = (total(exposition, COUNTER_NAMES[field]) for field in ("read_bytes", "total_bytes"))
    return None if read is None or full is None else (read, full)


def share_of_kv_read(exposition: str) -> float | None:
    """The first of `kv_bytes` over the second; None if the backend is not selected or nothing was decoded."""
    read, full = kv_bytes(exposition) or (0.0, 0.0)
    return read / full if full else None
