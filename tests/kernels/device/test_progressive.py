"""Progressive attention on the device, page for page against the literal Algorithm 1 of every row and KV head."""

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.copy.gpu import store_pages
from vllm_hybrid_sparse.kernels.progressive import reference
from vllm_hybrid_sparse.kernels.progressive.gpu import DeviceProgress, PageLoader, progressive_attention
from vllm_hybrid_sparse.kernels.progressive.stream_loader import StreamLoader
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages
from vllm_hybrid_sparse.policy.selectors import SpecSelector
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
HEAD_DIM = 16
KV_HEADS = 2
SCALE = 0.5


class Case:
    """Rows of requests of different lengths: their logical K and V, what the reference reads, and a pool."""

    def __init__(
        self, seq_lens: list[int], group: int, spec: SelectionSpec, spread: float, device: torch.device
    ) -> None:
        self.spec, self.device, self.group = spec, device, group
        self.query = spread * torch.randn(len(seq_lens), KV_HEADS * group, HEAD_DIM)
        self.kv = [torch.randn(2, seq_len, KV_HEADS, HEAD_DIM) for seq_len in seq_lens]
        self.expected = [[self._reference(row, head, spec) for head in range(KV_HEADS)] for row in range(len(seq_lens))]
        whole = SelectionSpec(ranked=True, max_pages=spec.max_pages)
        order = [[self._reference(row, head, whole).pages for head in range(KV_HEADS)] for row in range(len(seq_lens))]
        pages = max(len(group_order) for row in order for group_order in row)
        self.slots = torch.full((len(seq_lens), KV_HEADS, pages), -1, dtype=torch.int32)
        self.candidates = torch.zeros(len(seq_lens), KV_HEADS, dtype=torch.int32)
        slots_of_request = max(seq_lens) // 16 + 1
        self.pools = torch.full((2, len(seq_lens) * KV_HEADS * slots_of_request, 16, HEAD_DIM), torch.nan)
        for row, seq_len in enumerate(seq_lens):
            first_page, end_page = RETAINED.candidate_range(seq_len)
            for head in range(KV_HEADS):
                self.candidates[row, head] = end_page - first_page
                for place, page in enumerate(order[row][head]):
                    slot = (row * KV_HEADS + head) * slots_of_request + page
                    self.slots[row, head, place] = slot
                    self.pools[:, slot] = self.kv[row][:, page * 16 : page * 16 + 16, head]

    def _group(self, row: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
        key, value = self.kv[row][:, :, head]
        return self.query[row, head * self.group : (head + 1) * self.group], key, value

    def _reference(self, row: int, head: int, spec: SelectionSpec) -> reference.ProgressiveResult:
        return reference.progressive_attention(
            *self._group(row, head),
            selector=SpecSelector(spec),
            retained=RETAINED,
            scale=SCALE,
            summary="minmax",
        )

    def retained_states(self) -> tuple[Tensor, Tensor]:
        """What the rows have attended to before."""
        out, lse = torch.empty(self.query.shape), torch.empty(self.query.shape[:2])
        for row in range(len(self.query)):
            for head in range(KV_HEADS):
                query, key, value = self._group(row, head)
                heads = slice(head * self.group, (head + 1) * self.group)
                part = attend_pages(query, key, value, RETAINED.retained_pages(len(key)), SCALE)
                out[row, heads], lse[row, heads] = part[0].float(), part[1].float()
        return out.to(self.device), lse.to(self.device)

    def run(
        self, loader: PageLoader | None = None, pools: Tensor | None = None, log_left: Tensor | None = None
    ) -> tuple[Tensor, Tensor, DeviceProgress]:
        out, lse = self.retained_states()
        pools = self.pools.to(self.device) if pools is None else pools
        result = progressive_attention(
            self.query.to(self.device),
            pools[0],
            pools[1],
            self.slots.to(self.device),
            self.candidates.to(self.device),
            out,
            lse,
            scale=SCALE,
            threshold=self.spec.threshold,
            microbatch_pages=self.spec.microbatch_pages,
            loader=loader,
            log_left=log_left,
        )
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return out.cpu(), lse.cpu(), result

    def check(self, out: Tensor, lse: Tensor, result: DeviceProgress) -> None:
        """Pages read, P_acc and states are those of the reference, for each row and KV head by itself."""
        read = (self.slots >= 0).sum(dim=2) - result.progress.budget_left.cpu()
        for row, groups in enumerate(self.expected):
            for head, expected in enumerate(groups):
                heads = slice(head * self.group, (head + 1) * self.group)
                assert read[row, head] == len(expected.pages), f"row {row}, KV head {head}"
                assert_close(out[row, heads], expected.out)
                assert_close(lse[row, heads], expected.lse)
                mass = expected.mass[-1] if expected.mass else torch.ones(self.group)
                assert_close(result.progress.mass[row, heads].cpu(), mass)
        assert result.progress.done.all()
        assert result.progress.active.item() == 0
        assert result.progress.stop.item() == 1


@pytest.mark.parametrize("threshold", [0.3, 0.8, 0.97, 1.0])
@pytest.mark.parametrize(("group", "microbatch_pages"), [(1, 1), (3, 4), (8, 5)])
def test_every_row_reads_the_pages_of_algorithm_1(
    threshold: float, group: int, microbatch_pages: int, device: torch.device
) -> None:
    spec = SelectionSpec(ranked=True, threshold=threshold, microbatch_pages=microbatch_pages)
    case = Case([200, 40, 17, 131], group, spec, 2.0, device)
    case.check(*case.run())


def test_a_budget_ends_the_reading(device: torch.device) -> None:
    case = Case([200, 150], 2, SelectionSpec(ranked=True, threshold=0.99, max_pages=3, microbatch_pages=2), 0.3, device)
    assert {len(group.pages) for row in case.expected for group in row} == {3}
    out, lse, result = case.run()
    read = (case.slots >= 0).sum(dim=2) - result.progress.budget_left.cpu()
    assert read.tolist() == [[3, 3], [3, 3]]
    for row, groups in enumerate(case.expected):
        for head, expected in enumerate(groups):
            assert_close(out[row, 2 * head : 2 * head + 2], expected.out)
            assert_close(lse[row, 2 * head : 2 * head + 2], expected.lse)
    assert result.progress.stop.item() == 1


def test_requests_without_candidates_are_left_as_they_are_and_launch_nothing(device: torch.device) -> None:
    case = Case([17, 40, 1], 2, SelectionSpec(ranked=True, threshold=0.9), 1.0, device)
    before = [part.cpu() for part in case.retained_states()]
    out, lse, result = case.run()
    assert result.microbatches == 0
    assert torch.equal(out, before[0])
    assert torch.equal(lse, before[1])
    assert result.progress.stop.item() == 1


def test_the_stop_flag_ends_launching(device: torch.device) -> None:
    case = Case([400], 1, SelectionSpec(ranked=True, threshold=0.05, microbatch_pages=2), 2.0, device)
    *_, result = case.run()
    if device.type == "cpu":  # on a GPU the host may run ahead of the flag
        assert result.microbatches == max(len(group.mass) for group in case.expected[0])
    assert result.microbatches < 11


class LateLoader:
    """Puts a microbatch into its slots only when it is waited for, and keeps a list of what it was asked."""

    def __init__(self, case: Case, pools: Tensor) -> None:
        self.case, self.pools, self.calls = case, pools, []

    def start(self, microbatch: int) -> None:
        self.calls.append(("start", microbatch))

    def wait(self, microbatch: int) -> None:
        self.calls.append(("wait", microbatch))
        size = self.case.spec.microbatch_pages
        slots = self.case.slots[:, :, microbatch * size : (microbatch + 1) * size]
        for slot in slots[slots >= 0].tolist():
            self.pools[:, slot] = self.case.pools[:, slot].to(self.pools.device)


def test_each_microbatch_is_waited_for_and_the_next_one_started_before(device: torch.device) -> None:
    case = Case([300, 100], 2, SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=3), 1.0, device)
    pools = torch.full_like(case.pools, torch.nan, device=device)
    loader = LateLoader(case, pools)
    result = case.run(loader, pools)
    case.check(*result)
    launched = result[2].microbatches
    started = [index for name, index in loader.calls if name == "start"]
    assert started == list(range(min(launched + 1, -(-case.slots.shape[2] // 3))))
    assert [index for name, index in loader.calls if name == "wait"] == list(range(launched))
    for index in range(1, launched):
        assert loader.calls.index(("start", index)) < loader.calls.index(("wait", index - 1))


def test_pages_come_from_the_host_store_while_others_are_attended_to(device: torch.device) -> None:
    case = Case([300, 100, 40], 3, SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=3), 1.0, device)
    full = case.pools.to(device)
    host = torch.empty(case.pools.numel(), pin_memory=device.type == "cuda")
    elements = 2 * 16 * HEAD_DIM
    every = torch.arange(len(full[0]), device=device)
    store_pages(host, every * elements, every.int(), full[0], full[1])
    resident = case.slots.flatten()[case.slots.flatten() >= 0][::4]  # a quarter lies in its slot already
    pools = torch.full_like(full, torch.nan)
    pools[:, resident.long()] = full[:, resident.long()]
    offsets = case.slots.long() * elements
    offsets[torch.isin(case.slots, resident)] = -1
    slots = case.slots.to(device)
    loader = StreamLoader(host, offsets.to(device), slots, pools[0], pools[1], microbatch_pages=3)
    case.check(*case.run(loader, pools))


def test_with_estimates_reading_stops_when_the_unread_weigh_little(device: torch.device) -> None:
    """With the true weights as estimates, the mass at the last look is the true one, and one look earlier too low."""
    case = Case([300], 1, SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2), 1.5, device)
    microbatches = -(-case.slots.shape[2] // 2)
    log_left = torch.full((microbatches + 1, 1, KV_HEADS), -torch.inf)
    retained = case.retained_states()[1].cpu()[0]
    wanted = []
    for head in range(KV_HEADS):
        query = case.query[0, head].double()
        keys = case.pools[0][case.slots[0, head].long()].double()
        weights = (SCALE * keys @ query).logsumexp(dim=1)
        for index in range(microbatches):
            log_left[index, 0, head] = weights[2 * index :].logsumexp(dim=0)
        total = torch.logaddexp(retained[head].double(), weights.logsumexp(dim=0))
        kept = 1 - (log_left[:, 0, head].double() - total).exp()
        wanted.append(min(2 * int((kept > 0.9).nonzero()[0]), case.slots.shape[2]))
    *_, result = case.run(log_left=log_left.to(device))
    read = (case.slots >= 0).sum(dim=2) - result.progress.budget_left.cpu()
    assert read[0].tolist() == wanted
    assert any(0 < count < case.slots.shape[2] for count in wanted)


def test_bad_arguments_are_refused_by_name(device: torch.device) -> None:
    case = Case([100], 1, SelectionSpec(ranked=True, threshold=0.9), 1.0, device)
    with pytest.raises(KernelError, match=r"log_left="):
        case.run(log_left=torch.zeros(1, 1, KV_HEADS, device=device))
    arguments = (case.query, case.pools[0], case.pools[1], case.slots, case.candidates, *case.retained_states())
    moved = [part.to(device) for part in arguments]
    with pytest.raises(KernelError, match=r"microbatch_pages=0"):
        progressive_attention(*moved, scale=1.0, threshold=0.9, microbatch_pages=0)
    with pytest.raises(KernelError, match=r"threshold=2"):
        progressive_attention(*moved, scale=1.0, threshold=2, microbatch_pages=1)
