"""The cases that the device's kernels are timed on: inputs, the call, the bytes that it must move, and a check."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hybrid_sparse.kernels.copy.gpu import load_pages, store_pages
from vllm_hybrid_sparse.kernels.listed_attention.reference import page_of
from vllm_hybrid_sparse.kernels.listed_attention.state import HostStore
from vllm_hybrid_sparse.kernels.merge import reference as merge_reference
from vllm_hybrid_sparse.kernels.merge.gpu import merge_states
from vllm_hybrid_sparse.kernels.progressive.gpu import progressive_attention
from vllm_hybrid_sparse.kernels.progressive.stream_loader import StreamLoader
from vllm_hybrid_sparse.kernels.score.gpu import group_scores, rank_pages, score_pages
from vllm_hybrid_sparse.kernels.sparse_attention.gpu import attend_slots
from vllm_hybrid_sparse.kernels.summarize.gpu import summarize_slots
from vllm_hybrid_sparse.values import PAGE_TOKENS

TOLERANCE = 2e-2
"""Allowed error of bf16 kernels against the same sums in float32, relative to the largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call that is timed."""

    name: str
    size: str  # what it works on, for the table
    run: Callable[[], object]
    error: Callable[[], float]  # runs it and compares, relative to the largest value
    moved_bytes: int  # bytes that it must read and write
    ceiling: str  # which measured rate bounds it: device | from_host | to_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The memory that all cases share: far larger than the caches, so that each case reads from memory."""

    device: torch.device
    dtype: torch.dtype
    kv_heads: int
    group: int
    head_dim: int
    host: Tensor  # [pages * 2 * 16 * head_dim] of the host store
    k_pool: Tensor  # [slots, 16, head_dim]
    v_pool: Tensor

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's K and V."""
        return 2 * PAGE_TOKENS * self.head_dim * self.dtype.itemsize

    @property
    def num_slots(self) -> int:
        """Slots of the pool, and pages of the host memory."""
        return len(self.k_pool)

    def slots(self, *shape: int) -> Tensor:
        """Slots of the pool in random order, int32; each once if there are enough of them."""
        count = torch.Size(shape).numel()
        order = torch.randperm(self.num_slots, device=self.device, dtype=torch.int32)
        return order.repeat(-(-count // self.num_slots))[:count].view(shape)

    def stored(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the pages at these elements of the host memory, [16 * pages, head_dim] on the CPU."""
        elements = 2 * PAGE_TOKENS * self.head_dim
        store = HostStore(self.host, elements, elements, elements, 1)
        pages = [page_of(store, 0, offset // elements, self.head_dim) for offset in offsets.tolist()]
        keys, values = (torch.cat(part) for part in zip(*pages, strict=True))
        return keys, values

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers on the device, by default of the KV dtype."""
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)


def make_machine(
    device: torch.device, *, pool_bytes: int, dtype: torch.dtype, kv_heads: int, group: int, head_dim: int
) -> Machine:
    """Fill a pool and as much host memory with random numbers."""
    slots = pool_bytes // (2 * PAGE_TOKENS * head_dim * dtype.itemsize)
    pools = torch.empty(2, slots, PAGE_TOKENS, head_dim, dtype=dtype, device=device).normal_()
    host = torch.empty(pools.numel(), dtype=dtype, pin_memory=device.type == "cuda")
    host.copy_(pools.view(-1))
    return Machine(
        device=device,
        dtype=dtype,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        host=host,
        k_pool=pools[0],
        v_pool=pools[1],
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; NaN if either tensor has one."""
    expected = expected.double()
    return float((actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-9))


def copy_cases(machine: Machine, pages: int) -> Iterator[Case]:
    """Copy pages from and to the host, at scattered places."""
    slots = machine.slots(pages)
    elements = 2 * PAGE_TOKENS * machine.head_dim
    offsets = machine.slots(pages).long() * elements
    size = f"{pages} pages"

    def load() -> None:
        load_pages(machine.host, offsets, slots, machine.k_pool, machine.v_pool)

    def store() -> None:
        store_pages(machine.host, offsets, slots, machine.k_pool, machine.v_pool)

    def round_trip_error() -> float:
        before = torch.stack([machine.host[int(at) : int(at) + elements] for at in offsets.tolist()])
        load()
        for at in offsets.tolist():
            machine.host[at : at + elements] = 0
        store()
        if machine.device.type == "cuda":
            torch.cuda.synchronize()
        after = torch.stack([machine.host[int(at) : int(at) + elements] for at in offsets.tolist()])
        return relative_error(after, before)

    moved = pages * machine.page_bytes
    yield Case(name="load_pages", size=size, run=load, error=round_trip_error, moved_bytes=moved, ceiling="from_host")
    yield Case(name="store_pages", size=size, run=store, error=round_trip_error, moved_bytes=moved, ceiling="to_host")


def attend_case(machine: Machine, rows: int, pages: int) -> Case:
    """Attend to a microbatch of pages for each row and KV head."""
    q_heads = machine.kv_heads * machine.group
    query = machine.randn(rows, q_heads, machine.head_dim)
    slots = machine.slots(rows, machine.kv_heads, pages)
    tokens = torch.full_like(slots, PAGE_TOKENS)
    done = torch.zeros(rows, machine.kv_heads, dtype=torch.uint8, device=machine.device)
    out = torch.zeros(rows, q_heads, machine.head_dim, device=machine.device)
    lse = torch.full((rows, q_heads), -torch.inf, device=machine.device)
    page_lse = torch.empty(rows, q_heads, pages, device=machine.device)
    scale = machine.head_dim**-0.5

    def run() -> None:
        attend_slots(query, machine.k_pool, machine.v_pool, slots, tokens, done, out, lse, page_lse, scale=scale)

    def error() -> float:
        lse.fill_(-torch.inf)
        run()
        heads = query[0, : machine.group].float()
        keys, values = (pool[slots[0, 0].long()].flatten(0, 1).float() for pool in (machine.k_pool, machine.v_pool))
        expected = (scale * heads @ keys.T).softmax(dim=1) @ values
        return relative_error(out[0, : machine.group], expected)

    return Case(
        name="attend_slots",
        size=f"{rows} rows, {pages} pages",
        run=run,
        error=error,
        moved_bytes=slots.numel() * machine.page_bytes,
        ceiling="device",
    )


def score_cases(machine: Machine, rows: int, pages: int) -> Iterator[Case]:
    """Score all candidates of a context by each kind of summary; then group scores and the order of pages."""
    q_heads = machine.kv_heads * machine.group
    query = machine.randn(rows, q_heads, machine.head_dim)
    size = f"{rows} rows, {pages} pages"
    for summary, vectors in (("cuboid_mean", 1), ("minmax", 2)):
        summaries = machine.randn(rows * machine.kv_heads * pages, vectors, machine.head_dim)
        if vectors == 2:
            summaries = summaries.sort(dim=1, descending=True).values
        places = torch.arange(len(summaries), dtype=torch.int32, device=machine.device).view(rows, -1, pages)

        def run(summaries: Tensor = summaries, places: Tensor = places, summary: str = summary) -> Tensor:
            return score_pages(query, summaries, places, scale=1.0, summary=summary)

        def error(summaries: Tensor = summaries, run: Callable[[], Tensor] = run) -> float:
            first = summaries[:pages].float()
            products = query[0, : machine.group, None, None].float() * first  # [group, pages, vectors, head_dim]
            return relative_error(run()[0, : machine.group], products.amax(dim=2).sum(dim=2))

        yield Case(
            name=f"score_pages, {summary}",
            size=size,
            run=run,
            error=error,
            moved_bytes=summaries.numel() * summaries.element_size(),
            ceiling="device",
        )

    scores = machine.randn(rows, q_heads, pages, dtype=torch.float32)

    def group_error() -> float:
        shares = scores.log_softmax(dim=2).view(rows, machine.kv_heads, machine.group, pages).amax(dim=2)
        return relative_error(group_scores(scores, machine.kv_heads), shares)

    yield Case(
        name="group_scores",
        size=size,
        run=lambda: group_scores(scores, machine.kv_heads),
        error=group_error,
        moved_bytes=scores.numel() * 4 + rows * machine.kv_heads * pages * 4,
        ceiling="device",
    )
    shares = machine.randn(rows, machine.kv_heads, pages, dtype=torch.float32)
    yield Case(
        name="rank_pages",
        size=size,
        run=lambda: rank_pages(shares),
        error=lambda: float((shares.gather(2, rank_pages(shares)).diff(dim=2) > 0).any()),
        moved_bytes=shares.numel() * 12,
        ceiling="device",
    )


def summarize_case(machine: Machine, pages: int) -> Case:
    """Summarize pages that a prompt has filled."""
    slots = machine.slots(pages)
    places = torch.arange(pages, dtype=torch.int32, device=machine.device)
    summaries = torch.empty(pages, 1, machine.head_dim, dtype=machine.dtype, device=machine.device)

    def run() -> None:
        summarize_slots(machine.k_pool, slots, places, summaries, summary="cuboid_mean")

    def error() -> float:
        run()
        keys = machine.k_pool[slots.long()].float()
        return relative_error(summaries[:, 0], (keys.amax(dim=1) + keys.amin(dim=1)) / 2)

    return Case(
        name="summarize_slots",
        size=f"{pages} pages",
        run=run,
        error=error,
        moved_bytes=pages * machine.page_bytes // 2 + summaries.numel() * summaries.element_size(),
        ceiling="device",
    )


def merge_cases(machine: Machine, rows: int) -> Iterator[Case]:
    """Merge two states on the device; then with one of them in host memory, read in place."""
    q_heads = machine.kv_heads * machine.group
    outs = machine.randn(2, rows, q_heads, machine.head_dim, dtype=torch.float32)
    lses = machine.randn(2, rows, q_heads, dtype=torch.float32)
    state_bytes = outs[0].numel() * 4 + lses[0].numel() * 4
    expected = merge_reference.merge_states(outs[0].cpu(), lses[0].cpu(), outs[1].cpu(), lses[1].cpu())
    hosted = outs[1].cpu(), lses[1].cpu()
    if machine.device.type == "cuda":
        hosted = hosted[0].pin_memory(), hosted[1].pin_memory()
    for name, other, moved, ceiling in (
        ("merge_states", (outs[1], lses[1]), 3 * state_bytes, "device"),
        ("merge_states, one on the host", hosted, state_bytes, "from_host"),
    ):

        def run(other: tuple[Tensor, Tensor] = other) -> tuple[Tensor, Tensor]:
            return merge_states(outs[0], lses[0], *other)

        yield Case(
            name=name,
            size=f"{rows} rows",
            run=run,
            error=lambda run=run: relative_error(run()[0].cpu(), expected[0]),
            moved_bytes=moved,
            ceiling=ceiling,
        )


_MOST_RUNS = 1 << 16


def progressive_case(machine: Machine, rows: int, pages: int, microbatch_pages: int, *, missing: bool) -> Case:
    """All microbatches of a layer, without stopping early: the cost of launching, or of loading while computing.

    missing   False: every page lies in its slot; True: each is loaded first, on a stream of its own
    """
    q_heads = machine.kv_heads * machine.group
    query = machine.randn(rows, q_heads, machine.head_dim)
    slots = machine.slots(rows, machine.kv_heads, pages)
    candidates = torch.full(slots.shape[:2], pages, dtype=torch.int32, device=machine.device)
    scale = machine.head_dim**-0.5
    offsets = slots.long() * (2 * PAGE_TOKENS * machine.head_dim)
    # One flag per run, since the last kernels of a run may write theirs while the next run is being launched.
    stops = iter(torch.zeros(_MOST_RUNS, 1, dtype=torch.int32, pin_memory=machine.device.type == "cuda"))

    def run() -> Tensor:
        loader = None
        if missing:
            loader = StreamLoader(
                machine.host, offsets, slots, machine.k_pool, machine.v_pool, microbatch_pages=microbatch_pages
            )
        out = torch.zeros(rows, q_heads, machine.head_dim, device=machine.device)
        lse = torch.full((rows, q_heads), -torch.inf, device=machine.device)
        progressive_attention(
            query,
            machine.k_pool,
            machine.v_pool,
            slots,
            candidates,
            out,
            lse,
            scale=scale,
            threshold=1.0,
            microbatch_pages=microbatch_pages,
            loader=loader,
            stop=next(stops),
        )
        return out

    def error() -> float:
        chosen, pools = slots[0, 0].long(), (machine.k_pool, machine.v_pool)
        if missing:
            for pool in pools:
                pool[chosen] = torch.nan  # what is not loaded shows
            keys, values = (part.to(machine.device) for part in machine.stored(offsets[0, 0]))
        else:
            keys, values = (pool[chosen].flatten(0, 1) for pool in pools)
        heads = query[0, : machine.group].float()
        expected = (scale * heads @ keys.float().T).softmax(dim=1) @ values.float()
        errors = [relative_error(run()[0, : machine.group], expected)]
        if missing:  # the sum over all pages does not tell whether each lies in its own slot
            for pool, part in zip(pools, (keys, values), strict=True):
                errors.append(relative_error(pool[chosen].flatten(0, 1), part))
        return float(torch.tensor(errors).max())  # NaN if one is

    return Case(
        name=f"progressive, {'loading, ' if missing else ''}microbatches of {microbatch_pages}",
        size=f"{rows} rows, {pages} pages",
        run=run,
        error=error,
        moved_bytes=slots.numel() * machine.page_bytes,
        ceiling="from_host" if missing else "device",
    )


def all_cases(
    machine: Machine, *, rows: tuple[int, ...], context_pages: tuple[int, ...], microbatches: tuple[int, ...]
) -> Iterator[Case]:
    """Every kernel at every size."""
    for pages in context_pages:
        yield from copy_cases(machine, pages)
        yield summarize_case(machine, pages)
    for count in rows:
        for pages in microbatches:
            yield attend_case(machine, count, pages)
        for pages in context_pages:
            yield from score_cases(machine, count, pages)
        yield from merge_cases(machine, count)
        for microbatch in microbatches:
            for missing in (False, True):
                yield progressive_case(machine, count, max(microbatches), microbatch, missing=missing)
