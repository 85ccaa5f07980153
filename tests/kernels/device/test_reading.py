"""How much of an order is read, against the plain-torch reference: the plan, and reading on."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.device.test_listed_attention import SCALE, Store, make_store
from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.arguments import unread_tile
from vllm_hybrid_sparse.kernels.listed_attention.state import Tally
from vllm_hybrid_sparse.kernels.page_directory.state import ARRIVING, NOWHERE, Listed
from vllm_hybrid_sparse.kernels.reading import reference
from vllm_hybrid_sparse.kernels.reading.gpu import PageTables, RankedPages, plan_reading, read_on
from vllm_hybrid_sparse.kernels.reading.plan import ReadingPlan
from vllm_hybrid_sparse.kernels.reading.reference import Planned
from vllm_hybrid_sparse.runtime import gpu_ranking, plain_ranking
from vllm_hybrid_sparse.values import PAGE_TOKENS

KV_HEADS = 2


def make_pages(
    candidates: list[int], group: int, *, budgets: list[int] | None = None, spread: float = 2.0
) -> RankedPages:
    """Random scores, and each group's candidates by the best that a head gives them; on the CPU."""
    rows, most = len(candidates), max(candidates)
    scores = torch.full((rows, KV_HEADS * group, most), -torch.inf)
    order = torch.arange(most).expand(rows, KV_HEADS, most).clone()
    for row, num in enumerate(candidates):
        scores[row, :, :num] = spread * torch.randn(KV_HEADS * group, num)
        for head in range(KV_HEADS):
            of_heads = scores[row, head * group : (head + 1) * group, :num]
            order[row, head, :num] = of_heads.amax(dim=0).argsort(descending=True)
    return RankedPages(
        order,
        scores,
        torch.tensor(candidates, dtype=torch.int32),
        torch.tensor(budgets or candidates, dtype=torch.int32),
    )


def of_group(pages: RankedPages, row: int, head: int) -> tuple[Tensor, list[int], int]:
    """Scores [group, candidates] f64, order and budget."""
    num, group = int(pages.candidates[row]), pages.scores.shape[1] // KV_HEADS
    scores = pages.scores[row, head * group : (head + 1) * group, :num].double()
    return scores, pages.order[row, head, :num].tolist(), int(pages.budgets[row])


def to_device(pages: RankedPages, device: torch.device) -> RankedPages:
    return RankedPages(*(part.to(device) for part in pages))


def assert_close_logs(actual: Tensor, expected: Tensor) -> None:
    """Logs of estimated weights: what subtracting leaves is rounded to a thousandth at worst."""
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=0, atol=1e-3)


def check_plan(
    pages: RankedPages, retained: Tensor, threshold: float, microbatch: int, device: torch.device
) -> list[int]:
    """The kernel's plan is the reference's; the counts, row by row."""
    plan = plan_reading(to_device(pages, device), retained.to(device), threshold=threshold, microbatch_pages=microbatch)
    group = pages.scores.shape[1] // KV_HEADS
    counts = []
    for row in range(len(pages.candidates)):
        for head in range(KV_HEADS):
            heads = slice(head * group, (head + 1) * group)
            scores, order, budget = of_group(pages, row, head)
            expected = reference.plan_reading(
                scores, order, retained[row, heads].double(), budget, threshold, microbatch
            )
            assert int(plan.counts[row, head]) == expected.num_pages, (row, head)
            assert_close_logs(plan.log_unread[row, heads], expected.log_unread)
            assert abs(float(plan.kept[row, head]) - expected.share) < 1e-5
            counts.append(expected.num_pages)
    return counts


@pytest.mark.parametrize("group", [1, 3, 4, 8, 20])
@pytest.mark.parametrize(("threshold", "microbatch"), [(0.5, 8), (0.95, 1), (0.95, 5), (0.98, 8)])
def test_a_plan_reads_until_the_estimates_say_that_it_is_enough(
    device: torch.device, group: int, threshold: float, microbatch: int
) -> None:
    torch.manual_seed(7 * group + microbatch)
    pages = make_pages([40, 0, 1, 7, 300], group)
    retained = torch.randn(5, KV_HEADS * group) + 3.0
    counts = check_plan(pages, retained, threshold, microbatch, device)
    assert 0 < max(counts) < 300


@pytest.mark.parametrize("group", [3, 20])
def test_a_plan_without_a_threshold_is_the_budget(group: int, device: torch.device) -> None:
    pages = make_pages([600, 12, 0, 1], group, budgets=[290, 1, 0, 1])
    counts = check_plan(pages, torch.randn(4, KV_HEADS * group), 1.0, 8, device)
    assert counts == [290, 290, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("threshold", [0.9, 0.99])
def test_little_left_beside_estimates_that_are_too_high(threshold: float, device: torch.device) -> None:
    """The retained set weighs e^-20 of what the candidates are estimated to, so what little is left of them counts."""
    torch.manual_seed(5)
    pages = make_pages([300, 90], 3, spread=9.0)
    retained = pages.scores.logsumexp(dim=2) - 20.0
    counts = check_plan(pages, retained, threshold, 4, device)
    assert all(0 < count < 300 for count in counts)


@pytest.mark.parametrize("spread", [2.0, 9.0], ids=["much left", "little left"])
def test_an_order_may_list_no_more_than_the_budgets(spread: float, device: torch.device) -> None:
    torch.manual_seed(0)
    pages = make_pages([600, 40, 0], 3, budgets=[30, 2, 0], spread=spread)
    check_plan(pages, torch.zeros(3, 6), 1.0, 8, device)
    whole, short = (
        plan_reading(to_device(listed, device), torch.zeros(3, 6, device=device), threshold=1.0, microbatch_pages=8)
        for listed in (pages, pages._replace(order=pages.order[:, :, :30].contiguous()))
    )
    assert torch.equal(whole.counts, short.counts)
    assert_close_logs(short.log_unread, whole.log_unread.cpu().double())
    with pytest.raises(KernelError, match="order=700 pages: must be at most the 600 of scores"):
        plan_reading(
            to_device(pages._replace(order=torch.zeros(3, KV_HEADS, 700, dtype=torch.int64)), device),
            torch.zeros(3, 6, device=device),
            threshold=1.0,
            microbatch_pages=8,
        )


def test_a_plan_reads_nothing_where_the_retained_set_is_enough_and_everything_where_it_takes_all(
    device: torch.device,
) -> None:
    pages = make_pages([30, 30], 2)
    retained = torch.tensor([[200.0, 50.0, 40.0, 40.0], [-300.0, -90.0, -100.0, -100.0]])
    counts = check_plan(pages, retained, 0.9999999, 8, device)
    assert counts == [0, 0, 30, 30]


class Reading:
    """Rows whose candidates lie in a host store, some of them in slots as well, and what their groups are to read."""

    def __init__(self, store: Store, pages: RankedPages, *, first_page: int = 1) -> None:
        self.store, self.pages, self.first_page = store, pages, first_page
        of_block = store.host.pages_per_block
        blocks = len(store.key) // of_block
        self.blocks = torch.stack([torch.randperm(blocks) for _ in pages.candidates]).int()
        rows, most = len(pages.candidates), pages.scores.shape[2]
        places = first_page + torch.arange(most)
        self.lies = (self.blocks[:, places // of_block].long() * of_block + places % of_block).view(rows, most)
        # Another layer's entries before and behind this one's.
        self.first_entry = KV_HEADS * len(store.key)
        self.slots = torch.full((3 * self.first_entry,), 2**20, dtype=torch.int32)
        own = self.slots[self.first_entry : 2 * self.first_entry].view(KV_HEADS, -1)
        own.random_(ARRIVING, NOWHERE + 1)
        free = iter(torch.randperm(len(store.k_pool)).tolist())
        for head in range(KV_HEADS):
            for page in range(0, len(store.key), 2):
                slot = own[head, page] = next(free)
                store.k_pool[slot], store.v_pool[slot] = store.key[page, head], store.value[page, head]

    def attend(self, row: int, head: int, query: Tensor, candidates: list[int]) -> tuple[Tensor, Tensor]:
        """(out, lse) f64 of some candidates; query [group, head_dim]."""
        pages = self.lies[row, candidates]
        key, value = (part[pages, head].flatten(0, 1).double() for part in (self.store.key, self.store.value))
        scores = SCALE * query.double() @ key.T
        return scores.softmax(dim=-1) @ value, scores.logsumexp(dim=-1)

    def hits(self, planned: Tensor, counts: Tensor) -> int:
        """How many of the pages that are read behind those planned lie in slots."""
        own = self.slots[self.first_entry : 2 * self.first_entry].view(KV_HEADS, -1)
        hits = 0
        for row, lies in enumerate(self.lies):
            for head in range(KV_HEADS):
                further = self.pages.order[row, head, int(planned[row, head]) : int(counts[row, head])]
                hits += int((own[head, lies[further]] >= 0).sum())
        return hits

    def listed(self) -> Listed:
        """The first pages of the orders, none of them in a slot."""
        pages = self.lies.gather(1, self.pages.order.flatten(1)).view(self.pages.order.shape).int()
        return Listed(torch.full_like(pages, -1), pages, torch.full_like(pages, PAGE_TOKENS))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "microbatch", "threshold"),
    [
        (torch.float32, 64, 3, 8, 0.9),
        (torch.bfloat16, 128, 4, 3, 0.8),
        (torch.float16, 80, 1, 1, 0.9),
        (torch.float32, 64, 8, 2, 0.6),
    ],
)
def test_reading_on_ends_where_enough_is_read(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, microbatch: int, threshold: float
) -> None:
    check_reading_on(gpu_ranking, device, dtype, head_dim, group, microbatch, threshold)


@pytest.mark.parametrize("group", [3, 20])
@pytest.mark.parametrize("threshold", [0.6, 0.9])
def test_reading_on_where_estimates_were_far_too_high(threshold: float, group: int, device: torch.device) -> None:
    """What is left is as nothing beside what was expected, and is what counts. Of 20 heads it is summed in parts."""
    check_reading_on(gpu_ranking, device, torch.float32, 64, group, 2, threshold, spread=9.0)


def test_what_is_unread_is_summed_by_more_pages_than_are_read_at_a_time() -> None:
    assert [unread_tile(heads, head_dim) for heads, head_dim in ((16, 128), (32, 128), (16, 256))] == [128, 8, 16]


def test_the_emulated_device_reads_on_and_counts_likewise() -> None:
    check_reading_on(plain_ranking, torch.device("cpu"), torch.float32, 64, 3, 8, 0.9)


def check_reading_on(
    kernels: ModuleType,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    microbatch: int,
    threshold: float,
    *,
    spread: float = 1.0,
) -> None:
    torch.manual_seed(head_dim + group)
    store = make_store(dtype, blocks=16, kv_heads=KV_HEADS, head_dim=head_dim)
    candidates = [28, 0, 3, 20]
    # The estimates have nothing to do with what pages weigh, so that some groups have enough and others read on.
    pages = make_pages(candidates, group, budgets=[28, 0, 3, 17], spread=spread)
    pages.scores[:] += torch.tensor([4.0, 0.0, 4.0, 2.0])[:, None, None]
    reading = Reading(store, pages)
    query = torch.randn(4, KV_HEADS * group, head_dim).to(dtype)
    retained = torch.full((4, KV_HEADS * group), 5.0)

    where, on_device, tally = to_device(pages, device), store.to(device), Tally(device)
    plan = kernels.plan_reading(where, retained.to(device), threshold=threshold, microbatch_pages=microbatch)
    planned = plan.counts.cpu().clone()
    listed = Listed(*(part.to(device) for part in reading.listed()))
    args = query.to(device), on_device.k_pool, on_device.v_pool, on_device.host
    read = kernels.attend_listed(*args, listed, plan.counts, tally, scale=SCALE)
    kernels.read_on(
        *args,
        where,
        PageTables(
            reading.blocks.to(device), reading.slots.to(device), reading.first_page, reading.first_entry, len(store.key)
        ),
        retained.to(device),
        read,
        plan,
        tally,
        scale=SCALE,
        threshold=threshold,
        microbatch_pages=microbatch,
    )
    went_on = check_reading(reading, query, retained, (plan, planned), read, threshold, microbatch)
    assert went_on
    counts = plan.counts.cpu()
    looked = [num > 0 for num in candidates]
    numbers = dict(zip(Tally.NUMBERS, tally.numbers.tolist(), strict=True))
    assert numbers["pages"] == int(counts.sum())
    assert numbers["hits"] == reading.hits(planned, counts) > 0
    assert numbers["looked"] == KV_HEADS * sum(looked)
    assert numbers["stops"] == int((counts < pages.candidates[:, None]).sum())
    assert float(tally.kept) == pytest.approx(float(plan.kept[looked].sum()), rel=1e-5)


def check_reading(
    reading: Reading,
    query: Tensor,
    retained: Tensor,
    plans: tuple[ReadingPlan, Tensor],
    read: tuple[Tensor, Tensor],
    threshold: float,
    microbatch: int,
) -> int:
    """Every group has read what the reference does; how many of them read more than was planned."""
    plan, planned = plans
    group, went_on = query.shape[1] // KV_HEADS, 0
    for row in range(len(query)):
        for head in range(KV_HEADS):
            heads = slice(head * group, (head + 1) * group)
            scores, order, budget = of_group(reading.pages, row, head)
            start = reference.plan_reading(scores, order, retained[row, heads].double(), budget, threshold, microbatch)
            assert start.num_pages == int(planned[row, head])
            expected = reference.read_on(
                lambda some, row=row, head=head, heads=heads: reading.attend(row, head, query[row, heads], list(some)),
                scores,
                order,
                retained[row, heads].double(),
                Planned(*start),
                budget,
                threshold,
                microbatch,
            )
            assert int(plan.counts[row, head]) == expected.num_pages, (row, head)
            assert_close(read[0][row, heads].cpu(), expected.out, query.dtype)
            assert_close(read[1][row, heads].cpu(), expected.lse, query.dtype)
            assert_close_logs(plan.log_unread[row, heads], expected.log_unread)
            assert abs(float(plan.kept[row, head]) - expected.share) < 1e-3
            went_on += expected.num_pages > start.num_pages
    return went_on


@pytest.mark.parametrize(
    ("threshold", "microbatch", "wrong"), [(0.0, 8, "threshold"), (1.5, 8, "threshold"), (0.5, 0, "microbatch_pages")]
)
def test_a_rule_that_cannot_be_followed_is_refused(
    device: torch.device, threshold: float, microbatch: int, wrong: str
) -> None:
    pages = to_device(make_pages([3], 1), device)
    with pytest.raises(KernelError, match=f"{wrong}="):
        plan_reading(pages, torch.zeros(1, 2, device=device), threshold=threshold, microbatch_pages=microbatch)
    with pytest.raises(KernelError, match="order="):
        plan_reading(
            pages._replace(order=pages.order.int()),
            torch.zeros(1, 2, device=device),
            threshold=0.5,
            microbatch_pages=8,
        )


def test_a_plan_and_a_tally_that_do_not_fit_are_refused(device: torch.device) -> None:
    """Groups of two: two rows, two KV heads, four query heads."""
    store = make_store(torch.float32, blocks=4, kv_heads=KV_HEADS, head_dim=64)
    pages = make_pages([3, 5], 2)
    reading, on_device, where = Reading(store, pages), store.to(device), to_device(pages, device)
    tables = PageTables(
        reading.blocks.to(device), reading.slots.to(device), reading.first_page, reading.first_entry, len(store.key)
    )
    rule: dict[str, Any] = {"threshold": 0.5, "microbatch_pages": 8}
    retained = torch.zeros(2, 4, device=device)
    plan = plan_reading(where, retained, **rule)
    query = torch.zeros(2, 4, 64, device=device)
    read = torch.zeros(2, 4, 64, device=device), torch.zeros(2, 4, device=device)

    def refuses(name: str, shape: str, plan: ReadingPlan, tally: Tally) -> None:
        wanted = rf"^{name}=\[.*\] \w+ on .*, strides \[.*\]: must be \[{shape}\] \w+ on .*, contiguous$"
        with pytest.raises(KernelError, match=wanted):
            read_on(
                query, on_device.k_pool, on_device.v_pool, on_device.host, where, tables, retained, read, plan, tally,
                scale=SCALE, **rule,
            )  # fmt: skip

    for name, shape in (("counts", "2, 2"), ("log_unread", "2, 4"), ("kept", "2, 2")):
        right = getattr(plan, name)
        for wrong in (right[:1], right.double(), right.to("meta"), right.repeat(1, 2)[:, ::2]):
            refuses(name, shape, replace(plan, **{name: wrong}), Tally(device))
    for name, shape in (("numbers", "6"), ("kept", "1")):
        for change in (lambda right: right[:0], lambda right: right.float(), lambda right: right.to("meta")):
            tally = Tally(device)
            setattr(tally, name, change(getattr(tally, name)))
            refuses(f"tally {name}", shape, plan, tally)
    where = where._replace(order=where.order[:, :, :4].contiguous())
    with pytest.raises(KernelError, match=r"^order=4 pages: reading on needs all 5 of scores$"):
        read_on(
            query, on_device.k_pool, on_device.v_pool, on_device.host, where, tables, retained, read, plan,
            Tally(device), scale=SCALE, **rule,
        )  # fmt: skip
