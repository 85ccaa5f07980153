"""How much of the cache decoding read: plain sums, and the line that says them."""

from dataclasses import dataclass, fields
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """Sums over decode rows, KV heads and layers. A full read is every page of the context, K and V."""

    pages_total: int = 0  # a full read
    pages_read: int = 0  # retained set and selected, K and V
    pages_wasted: int = 0  # read ahead of a stop and dropped
    total_bytes: int = 0  # a full read
    read_bytes: int = 0  # pages read or wasted, and summaries scored
    early_stops: int = 0  # (request, KV head, layer) that reached the threshold before the last candidate
    packed_bytes: int = 0  # held by HGCA's packed copies when the sums were taken

    def __add__(self, other: Self) -> "DecodeStats":
        return DecodeStats(
            pages_total=self.pages_total + other.pages_total,
            pages_read=self.pages_read + other.pages_read,
            pages_wasted=self.pages_wasted + other.pages_wasted,
            total_bytes=self.total_bytes + other.total_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            early_stops=self.early_stops + other.early_stops,
            packed_bytes=self.packed_bytes + other.packed_bytes,
        )

    @classmethod
    def from_native(cls, stats: Any, layout: Any) -> "DecodeStats":
        """From the native core's sums and the layout of its pages."""
        pages = stats.pages_read + stats.pages_wasted
        return cls(
            pages_total=stats.pages_total,
            pages_read=stats.pages_read,
            pages_wasted=stats.pages_wasted,
            total_bytes=stats.pages_total * layout.page_bytes,
            read_bytes=pages * layout.page_bytes + stats.summaries_scored * layout.summary_bytes,
            early_stops=stats.stopped_early,
        )

    def describe(self) -> str:
        """One line for a log; the share counts summaries as read and a full read without them."""
        share = 100.0 * self.read_bytes / self.total_bytes if self.total_bytes else 0.0
        packed = f"; {self.packed_bytes} bytes of packed copies" if self.packed_bytes else ""
        return (
            f"hybrid_sparse: decode read {share:.1f} % of the KV bytes (pages {self.pages_read} of {self.pages_total}, "
            f"{self.pages_wasted} read ahead and dropped, {self.read_bytes} of {self.total_bytes} bytes with summaries)"
            f"{packed}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Sums over decode rows, KV heads and layers of what a device and its host did. A page is K and V of a KV head."""

    groups: int = 0  # (request, KV head, layer)
    pages_wanted: int = 0  # asked of the pool: retained set and selected
    pages_hit: int = 0  # of them, those that the device had
    pages_fetched: int = 0  # of them, those that were copied from the host store
    pages_evicted: int = 0  # made room for them
    pages_wasted: int = 0  # wanted for a group that had enough before they were attended
    pages_on_host: int = 0  # attended where they lie, by the host
    groups_on_host: int = 0  # that the host took
    microbatches: int = 0  # attended by the device, of one group each
    early_stops: int = 0  # groups that had enough before their last candidate
    looked_groups: int = 0  # groups that were looked at for that
    kept_mass: float = 0.0  # sum over them of P_acc at the stop, of the head that had least
    failed_loads: int = 0  # parts of microbatches that could not be loaded; the host attended them
    device_busy_s: float = 0.0  # time that the device computed
    step_s: float = 0.0  # time that the layers' decode rows took

    def __add__(self, other: Self) -> "TierStats":
        return TierStats(
            **{entry.name: getattr(self, entry.name) + getattr(other, entry.name) for entry in fields(TierStats)}
        )

    def describe(self) -> str:
        """One line for a log."""
        hit = 100.0 * self.pages_hit / self.pages_wanted if self.pages_wanted else 0.0
        idle = 100.0 * (1 - self.device_busy_s / self.step_s) if self.step_s else 0.0
        kept = f"{self.kept_mass / self.looked_groups:.3f}" if self.looked_groups else "-"
        return (
            f"hybrid_sparse: device pool hit {hit:.1f} % of {self.pages_wanted} pages ({self.pages_fetched} fetched, "
            f"{self.pages_evicted} evicted, {self.pages_wasted} wasted); {self.groups_on_host} of {self.groups} groups "
            f"and {self.pages_on_host} pages on the host; {self.microbatches} microbatches, {self.early_stops} early "
            f"stops, kept mass {kept}; device idle {idle:.0f} %; {self.failed_loads} failed loads"
        )
