"""The main latencies by what made the requests: prose, documents, a task, or the names that a trace gives."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_hybrid_sparse.load.exchange import Record
from vllm_hybrid_sparse.load.percentiles import Distribution

UNNAMED = "no source"  # of requests of a trace that does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFigures:
    """The requests of one source; latencies in seconds, over those answered, None without any."""

    planned: int
    answered: int
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_p50_s: float | None  # time between tokens, all requests of the source pooled
    tbt_p99_s: float | None

    @classmethod
    def of(cls, planned: int, records: Iterable[Record]) -> "SourceFigures":
        """Sum up the records of one source."""
        answered = [record for record in records if record.ok]
        ttft = Distribution.of(record.ttft_s for record in answered)
        tbt = Distribution.of(gap for record in answered for gap in record.gaps_s)
        return cls(
            planned=planned,
            answered=len(answered),
            ttft_p50_s=ttft.p50,
            ttft_p99_s=ttft.p99,
            tbt_p50_s=tbt.p50,
            tbt_p99_s=tbt.p99,
        )


def by_source(planned: Mapping[str | None, int], records: Iterable[Record]) -> dict[str, SourceFigures]:
    """Return the figures of each source, by name in alphabetical order; empty unless there are at least two.

    planned   requests by source, including those that were not sent; None is the source of those that name none
    records   of these requests
    """
    counts: dict[str, int] = {}
    for source, count in planned.items():
        counts[source or UNNAMED] = counts.get(source or UNNAMED, 0) + count
    if len(counts) < 2:
        return {}
    of_each: dict[str, list[Record]] = {name: [] for name in sorted(counts)}
    for record in records:
        of_each[record.source or UNNAMED].append(record)
    return {name: SourceFigures.of(counts[name], found) for name, found in of_each.items()}
