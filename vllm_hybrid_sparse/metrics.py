"""How much of the cache decoding read: plain sums, and the line that says them."""

from dataclasses import dataclass
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
    groups: int = 0  # (request, KV head, layer), each once a step
    streaming_groups: int = 0  # of them, those that Fluxion let read the retained set alone
    anchor_bytes: int = 0  # read to observe Fluxion's anchors, beside read_bytes
    packed_bytes: int = 0  # held by HGCA's packed copies when the sums were taken

    def __add__(self, other: Self) -> "DecodeStats":
        return DecodeStats(
            pages_total=self.pages_total + other.pages_total,
            pages_read=self.pages_read + other.pages_read,
            pages_wasted=self.pages_wasted + other.pages_wasted,
            total_bytes=self.total_bytes + other.total_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            early_stops=self.early_stops + other.early_stops,
            groups=self.groups + other.groups,
            streaming_groups=self.streaming_groups + other.streaming_groups,
            anchor_bytes=self.anchor_bytes + other.anchor_bytes,
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
            groups=stats.items,
            streaming_groups=stats.streaming,
            anchor_bytes=stats.anchor_pages * layout.page_bytes,
        )

    def describe(self) -> str:
        """One line for a log; the share counts summaries as read and a full read without them."""
        share = 100.0 * self.read_bytes / self.total_bytes if self.total_bytes else 0.0
        packed = f"; {self.packed_bytes} bytes of packed copies" if self.packed_bytes else ""
        streaming = f"; {self.streaming_groups} of {self.groups} groups streaming" if self.streaming_groups else ""
        anchors = f"; {self.anchor_bytes} bytes read for anchors" if self.anchor_bytes else ""
        return (
            f"hybrid_sparse: decode read {share:.1f} % of the KV bytes (pages {self.pages_read} of {self.pages_total}, "
            f"{self.pages_wasted} read ahead and dropped, {self.read_bytes} of {self.total_bytes} bytes with summaries)"
            f"{packed}{streaming}{anchors}"
        )
