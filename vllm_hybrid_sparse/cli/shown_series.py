"""The series that the demo shows of a server's /metrics."""

from vllm_hybrid_sparse.cli.counter_names import COUNTER_NAMES
from vllm_hybrid_sparse.load.prometheus import total

SHOWN_FIELDS = ("rows", "total_bytes", "read_bytes", "summary_bytes", "judged", "kept_mass")
"""In this order: what was decoded, what full attention reads, what was read, and what share of the attention was kept
by estimate (`kept_mass` of `judged`; both 0 under a policy without a threshold)."""


def shown_series(exposition: str) -> list[str]:
    """A line `name value` for each series of `SHOWN_FIELDS`, summed over its labels, values in a column.

    exposition   text of /metrics
    returns      without series that the text does not have; empty if the backend is not selected
    """
    found = [(name, total(exposition, name)) for name in (COUNTER_NAMES[field] for field in SHOWN_FIELDS)]
    return [f"{name:<44}{value:>18,.0f}" for name, value in found if value is not None]
