"""The verifying kernel: Algorithm 1 after a microbatch, `done`, and the stop flag."""

import pytest
import torch
from torch import Tensor

from tests.tolerances import assert_close
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.verify import reference
from vllm_hybrid_sparse.kernels.verify.gpu import verify
from vllm_hybrid_sparse.kernels.verify.progress import Progress

WEIGHTS = [98.0, 84.0, 68.0, 55.0, 31.0, 22.0, 15.0, 10.0, 8.2, 6.1, 4.9, 4.3]  # the paper's figure 4


def begin(candidates: Tensor, budget: Tensor, q_heads: int, device: torch.device) -> Progress:
    return Progress.begin(candidates.int().to(device), budget.int().to(device), q_heads)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("threshold", "microbatches", "mass"),
    [(0.40, 1, 305 / (305 + 55 * 8)), (0.42, 2, 383 / (383 + 10 * 4)), (0.90, 2, 383 / 423), (0.91, 3, 1.0)],
)
def test_algorithm_1_on_the_weights_of_figure_4(
    threshold: float, microbatches: int, mass: float, device: torch.device
) -> None:
    progress = begin(torch.tensor([[12]]), torch.tensor([[12]]), 1, device)
    weights = torch.tensor(WEIGHTS, device=device)
    read = 0
    verify(torch.tensor([[-torch.inf]], device=device), weights.new_empty(1, 1, 0), progress, threshold=threshold)
    while not progress.done.item():
        assert not progress.stop.item()
        read += 4
        page_lse = weights[read - 4 : read].log().view(1, 1, 4)
        verify(weights[:read].sum().log().view(1, 1), page_lse, progress, threshold=threshold)
        settle(device)
    assert read == 4 * microbatches
    assert progress.mass.item() == pytest.approx(mass, rel=1e-5)
    assert progress.stop.item() == 1


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("pages", [0, 1, 5, 64, 131])
@pytest.mark.parametrize("estimated", [False, True])
def test_a_look_is_the_reference_s(estimated: bool, pages: int, group: int, device: torch.device) -> None:
    rows, kv_heads = 7, 2
    candidates = torch.randint(pages, pages + 6, (rows, kv_heads))
    budget = torch.minimum(candidates, torch.randint(pages, pages + 6, (rows, kv_heads)))
    progress = begin(candidates, budget, kv_heads * group, device)
    progress.lightest.copy_(2 * torch.randn(rows, kv_heads * group))
    progress.lightest[0] = torch.inf
    page_lse = torch.randn(rows, kv_heads, group, pages)
    if pages:
        page_lse[1, 0, :, -1] = -torch.inf  # a short microbatch
        page_lse[2] = -torch.inf
    page_lse = page_lse.flatten(1, 2)
    lse = 3 + torch.randn(rows, kv_heads * group)
    lse[3] = -torch.inf
    log_left = torch.randn(rows, kv_heads * group) if estimated else None
    if log_left is not None:
        log_left[4] = -torch.inf
    before = progress.lightest.cpu().clone()
    verify(
        lse.to(device),
        page_lse.to(device),
        progress,
        threshold=0.9,
        log_left=None if log_left is None else log_left.to(device),
    )
    expected = reference.verify(lse, page_lse, before, candidates, budget, 0.9, log_left)
    assert_close(progress.lightest.cpu(), expected.lightest)
    assert_close(progress.mass.cpu(), expected.mass)
    assert torch.equal(progress.pages_left.cpu().long(), expected.pages_left)
    assert torch.equal(progress.budget_left.cpu().long(), expected.budget_left)
    assert torch.equal(progress.done.cpu().bool(), expected.done)
    assert progress.active.item() == int((~expected.done).sum())
    settle(device)
    assert bool(progress.stop.item()) == bool(expected.done.all())


def test_groups_that_are_done_are_left_as_they_are(device: torch.device) -> None:
    progress = begin(torch.full((2, 2), 9), torch.full((2, 2), 9), 4, device)
    progress.done[0, 1] = 1
    progress.active.fill_(3)
    lse, page_lse = torch.full((2, 4), 5.0, device=device), torch.zeros(2, 4, 3, device=device)
    page_lse[0, 2:] = torch.nan  # what a done group's page weights hold is nothing
    verify(lse, page_lse, progress, threshold=0.99)
    assert progress.pages_left.tolist() == [[6, 9], [6, 6]]
    assert progress.mass[0, 2:].tolist() == [0.0, 0.0]
    assert progress.lightest[0, 2:].tolist() == [torch.inf, torch.inf]
    assert progress.active.item() == 3


def test_the_stop_flag_is_set_by_the_last_group_and_only_then(device: torch.device) -> None:
    progress = begin(torch.tensor([[4, 4], [4, 4], [0, 8]]), torch.tensor([[4, 4], [4, 4], [0, 8]]), 2, device)
    lse, two = torch.full((3, 2), 2.0, device=device), torch.zeros(3, 2, 2, device=device)
    stops = []
    for page_lse in (two[:, :, :0].contiguous(), two, two, two, two):
        verify(lse, page_lse, progress, threshold=1.0)
        settle(device)
        stops.append((int(progress.active), int(progress.stop)))
    assert stops == [(5, 0), (5, 0), (1, 0), (1, 0), (0, 1)]


def test_a_group_goes_on_until_its_last_head_is_done(device: torch.device) -> None:
    progress = begin(torch.tensor([[9]]), torch.tensor([[9]]), 2, device)
    page_lse = torch.zeros(1, 2, 1, device=device)
    verify(torch.tensor([[9.0, 1.0]], device=device), page_lse, progress, threshold=0.9)
    assert progress.done.item() == 0
    verify(torch.tensor([[9.0, 9.0]], device=device), page_lse, progress, threshold=0.9)
    assert progress.done.item() == 1


def test_threshold_one_reads_all_and_the_budget_ends_it(device: torch.device) -> None:
    progress = begin(torch.tensor([[3, 9]]), torch.tensor([[3, 2]]), 2, device)
    lse, page_lse = torch.full((1, 2), 99.0, device=device), torch.zeros(1, 2, 1, device=device)
    done = []
    for _ in range(3):
        verify(lse, page_lse, progress, threshold=1.0)
        done.append(progress.done.flatten().tolist())
    assert done == [[0, 0], [0, 1], [1, 1]]


def test_with_an_estimate_a_retained_set_may_be_enough(device: torch.device) -> None:
    progress = begin(torch.tensor([[5]]), torch.tensor([[5]]), 1, device)
    nothing = torch.empty(1, 1, 0, device=device)
    verify(torch.tensor([[4.0]], device=device), nothing, progress, threshold=0.9)
    assert progress.done.item() == 0
    verify(
        torch.tensor([[4.0]], device=device),
        nothing,
        progress,
        threshold=0.9,
        log_left=torch.tensor([[1.0]], device=device),
    )
    assert progress.done.item() == 1


def test_a_weight_that_is_not_a_number_is_never_enough(device: torch.device) -> None:
    progress = begin(torch.tensor([[2]]), torch.tensor([[2]]), 1, device)
    lse, page_lse = torch.full((1, 1), torch.nan, device=device), torch.zeros(1, 1, 1, device=device)
    verify(lse, page_lse, progress, threshold=0.1)
    assert progress.done.item() == 0
    verify(lse, page_lse, progress, threshold=0.1)
    assert progress.done.item() == 1, "the budget ends it"


def test_bad_arguments_are_refused_by_name() -> None:
    progress = begin(torch.tensor([[5]]), torch.tensor([[5]]), 2, torch.device("cpu"))
    lse, page_lse = torch.zeros(1, 2), torch.zeros(1, 2, 3)
    with pytest.raises(KernelError, match=r"threshold=0\.0"):
        verify(lse, page_lse, progress, threshold=0.0)
    with pytest.raises(KernelError, match=r"threshold=1\.1"):
        verify(lse, page_lse, progress, threshold=1.1)
    with pytest.raises(KernelError, match=r"lse=\[1, 3\]"):
        verify(torch.zeros(1, 3), page_lse, progress, threshold=0.5)
    with pytest.raises(KernelError, match=r"log_left="):
        verify(lse, page_lse, progress, threshold=0.5, log_left=torch.zeros(2))
    with pytest.raises(KernelError, match=r"q_heads=3"):
        Progress.begin(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32), 3)
