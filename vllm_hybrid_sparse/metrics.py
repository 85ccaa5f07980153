"""How much of the cache decoding read: plain sums, and log lines that report them."""

from dataclasses import dataclass, fields
from typing import Any, Self

_GIB = 2.0**30


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStats:
    """Sums over decode rows, KV heads and layers. A full read is every page of the context, K and V.

    A *row* is one query token of one request in one step; a *selection* is one row, KV head and layer. The last token
    of a prompt counts too if a step computes it alone.
    """

    rows: int = 0
    selections: int = 0
    pages_total: int = 0  # a full read
    pages_read: int = 0  # retained set and selected, K and V; a common prefix for the first row that has it
    pages_shared: int = 0  # attended to as well, but read with another row's: a common prefix is read once
    pages_wasted: int = 0  # read ahead of a stop and dropped
    total_bytes: int = 0  # a full read
    read_bytes: int = 0  # pages read or wasted, and summaries scored
    summary_bytes: int = 0  # the part of read_bytes that were summaries
    early_stops: int = 0  # selections that reached the threshold before the last candidate
    judged: int = 0  # selections with a threshold, hence with an estimate of the weight they kept
    kept_mass: float = 0.0  # sum over `judged` of the estimated share of the weight kept, of the group's lowest head
    microbatches: int = 0  # checks of the threshold
    streaming: int = 0  # selections that Fluxion let read the retained set alone
    anchor_bytes: int = 0  # read to observe Fluxion's anchors, not part of read_bytes

    def __add__(self, other: Self) -> "DecodeStats":
        return DecodeStats(
            **{entry.name: getattr(self, entry.name) + getattr(other, entry.name) for entry in fields(self)}
        )

    @classmethod
    def from_native(cls, stats: Any, layout: Any) -> "DecodeStats":
        """From the native core's sums and the layout of its pages. The sums have no `rows`: it stays 0."""
        pages = stats.pages_read + stats.pages_wasted
        return cls(
            selections=stats.items,
            pages_total=stats.pages_total,
            pages_read=stats.pages_read,
            pages_shared=stats.pages_shared,
            pages_wasted=stats.pages_wasted,
            total_bytes=stats.pages_total * layout.page_bytes,
            read_bytes=pages * layout.page_bytes + stats.summary_bytes,
            summary_bytes=stats.summary_bytes,
            early_stops=stats.stopped_early,
            judged=stats.judged,
            kept_mass=stats.kept_mass,
            microbatches=stats.microbatches,
            streaming=stats.streaming,
            anchor_bytes=stats.anchor_pages * layout.page_bytes,
        )

    @property
    def share_read(self) -> float:
        """Bytes read over those of a full read, counting summaries as read; 0 if nothing was decoded."""
        return self.read_bytes / self.total_bytes if self.total_bytes else 0.0

    def describe(self, seconds: float = 0.0, packed_bytes: int = 0, untimed_rows: int = 0) -> str:
        """One line for a log.

        seconds        that decoding took, but for the first `untimed_rows` rows; 0 leaves out the rate
        packed_bytes   what HGCA's packed copies hold now
        """
        rate = f" ({(self.rows - untimed_rows) / seconds:.1f} a second)" if seconds > 0 else ""
        parts = [
            f"decoded {self.rows} tokens{rate}, reading {self.share_read:.1%} of their KV cache "
            f"({self.read_bytes / _GIB:.2f} of {self.total_bytes / _GIB:.2f} GiB)"
        ]
        if self.judged:
            parts.append(f"kept {self.kept_mass / self.judged:.1%} of the attention weight by estimate")
        if self.pages_shared:
            shared = self.pages_shared / (self.pages_read + self.pages_shared)
            parts.append(f"{shared:.1%} of the pages attended to came with other rows' reading")
        if self.pages_wasted:
            wasted = self.pages_wasted / (self.pages_read + self.pages_wasted)
            parts.append(f"{wasted:.1%} of the pages read were dropped")
        if self.streaming:
            parts.append(f"{self.streaming / self.selections:.1%} of the groups streamed")
        if self.anchor_bytes:
            parts.append(f"anchors took {self.anchor_bytes / _GIB:.2f} GiB more")
        if packed_bytes:
            parts.append(f"packed copies hold {packed_bytes / _GIB:.2f} GiB")
        return f"hybrid_sparse: {'; '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What a device and its host did, summed over decode rows, KV heads and layers. A page is K and V of a KV head."""

    groups: int = 0  # (request, KV head, layer)
    pages_wanted: int = 0  # asked of the pool: retained set and selected pages
    pages_hit: int = 0  # wanted pages that the device had
    pages_fetched: int = 0  # wanted pages that were copied from the host store
    pages_evicted: int = 0  # pages that made room for fetched ones; not known, and 0, where the device ranks pages
    pages_wasted: int = 0  # wanted, but the group had enough before they were attended
    resident_groups: int = 0  # groups of rows that the device read by itself, since it had all their blocks
    ranked_groups: int = 0  # groups of rows whose pages the device chose; what they read is counted a little later
    blocks_entered: int = 0  # blocks copied to the device whole, with all layers
    pages_on_host: int = 0  # pages that the host attended where they lie
    groups_on_host: int = 0  # groups that the host took
    microbatches: int = 0  # microbatches of one group that the device attended
    early_stops: int = 0  # groups that had enough before their last candidate
    looked_groups: int = 0  # groups that were checked for that
    kept_mass: float = 0.0  # sum over `looked_groups` of P_acc at the stop, of the lowest head
    failed_loads: int = 0  # parts of microbatches that could not be loaded; the host attended them
    device_busy_s: float = 0.0  # time that the device computed
    host_busy_s: float = 0.0  # time that the host spent on the groups that it took
    step_s: float = 0.0  # time that the decode rows of the layers took

    def __add__(self, other: Self) -> "TierStats":
        return TierStats(
            **{entry.name: getattr(self, entry.name) + getattr(other, entry.name) for entry in fields(TierStats)}
        )

    def describe(self) -> str:
        """One line for a log. A dash stands for what is not known.

        Those are times without a two-tier row, which alone is timed, and evictions if the device ranks.
        """
        hit = 100.0 * self.pages_hit / self.pages_wanted if self.pages_wanted else 0.0
        idle = f"{100.0 * (1 - self.device_busy_s / self.step_s):.0f} %" if self.step_s else "-"
        host = f"{100.0 * self.host_busy_s / self.step_s:.0f} %" if self.step_s else "-"
        evicted = "-" if self.ranked_groups else str(self.pages_evicted)
        kept = f"{self.kept_mass / self.looked_groups:.3f}" if self.looked_groups else "-"
        whole = ""
        if self.resident_groups or self.blocks_entered:
            whole = f"{self.resident_groups} groups resident, {self.blocks_entered} blocks entered; "
        if self.ranked_groups:
            whole += f"{self.ranked_groups} groups ranked by the device; "
        return (
            f"hybrid_sparse: device pool hit {hit:.1f} % of {self.pages_wanted} pages ({self.pages_fetched} fetched, "
            f"{evicted} evicted, {self.pages_wasted} wasted); "
            f"{whole}{self.groups_on_host} of {self.groups} groups and {self.pages_on_host} pages on the host; "
            f"{self.microbatches} microbatches, {self.early_stops} early stops, kept mass {kept}; "
            f"device idle {idle}, host busy {host}; {self.failed_loads} failed loads"
        )


class Interval:
    """What was decoded since the last log lines, and when the next ones are due."""

    def __init__(self, length_s: float) -> None:
        self._length_s = length_s
        self._stats = DecodeStats()
        self._tiers = TierStats()
        self._first_rows = 0  # rows of the first step, which ended at `_begun_s`
        self._begun_s = self._latest_s = 0.0

    def add(self, stats: DecodeStats, tiers: TierStats | None, now_s: float) -> None:
        """Count a step that ended now; a step without decode rows does not count. Without a device `tiers` is None."""
        if not stats.rows:
            return
        if not self._stats.rows:
            self._first_rows, self._begun_s = stats.rows, now_s
        self._latest_s = now_s
        self._stats = self._stats + stats
        if tiers is not None:
            self._tiers = self._tiers + tiers

    def due(self, now_s: float) -> bool:
        """Whether lines are due: the interval's length has passed since the first step counted."""
        return bool(self._stats.rows) and now_s - self._begun_s >= self._length_s

    def take(self, packed_bytes: int) -> list[str]:
        """Return the lines and begin anew; none if nothing was decoded.

        The rate is from the end of the first step to that of the last, of the rows between; a single step has none.
        """
        stats, self._stats = self._stats, DecodeStats()
        tiers, self._tiers = self._tiers, TierStats()
        seconds = self._latest_s - self._begun_s
        lines = [stats.describe(seconds, packed_bytes, self._first_rows)] if stats.rows else []
        return [*lines, tiers.describe()] if tiers.groups else lines
