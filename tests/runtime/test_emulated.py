"""What a device computes, compared with attention over the same pages. What it must not look at is NaN.

The emulated device and the CUDA device with interpreted kernels must pass the same tests.
"""

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from tests.tolerances import assert_close
from vllm_hybrid_sparse.kernels.sparse_attention.reference import attend_pages, attend_slots
from vllm_hybrid_sparse.memory.device_pool import PoolShape
from vllm_hybrid_sparse.memory.page_keys import page_numbers
from vllm_hybrid_sparse.memory.transfers import Loaded
from vllm_hybrid_sparse.runtime.device import RowStates
from vllm_hybrid_sparse.runtime.readings import Reading, ReadingWave
from vllm_hybrid_sparse.runtime.tiers import open_device
from vllm_hybrid_sparse.values import GroupKey

HEAD_DIM = 32


def filled_pool(slots: int, holding: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pools of NaN with some pages, [2, tokens, head_dim] K and V, in their slots."""
    pools = torch.full((2, slots, 16, HEAD_DIM), torch.nan)
    for slot, page in holding.items():
        pools[:, slot, : page.shape[1]] = page
    return pools[0], pools[1]


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_pages_in_any_slots_are_attended(group: int, tokens: int) -> None:
    content = torch.randn(2, tokens, HEAD_DIM)
    pages = content.split(16, dim=1)
    order = [5, 0, 3][: len(pages)]
    key, value = filled_pool(7, dict(zip(order, pages, strict=True)))
    query = torch.randn(2, group, HEAD_DIM)
    slots = torch.tensor([[*order, -1], [-1] * (len(order) + 1)])
    counts = torch.tensor([[page.shape[1] for page in pages] + [9], [16] * (len(order) + 1)])
    out, lse, page_lse, scores = attend_slots(query, key, value, slots, counts, 0.2)
    wanted_scores = 0.2 * query[0] @ content[0].T
    assert_close(scores[0].flatten(1)[:, :tokens], wanted_scores)
    assert scores[0].flatten(1)[:, tokens:].eq(-torch.inf).all()
    wanted_out, wanted_lse = attend_pages(query[0], content[0], content[1], range(len(pages)), 0.2)
    assert_close(out[0], wanted_out)
    assert_close(lse[0], wanted_lse)
    by_page = [attend_pages(query[0], content[0], content[1], [page], 0.2)[1] for page in range(len(pages))]
    assert_close(page_lse[0, :, :-1], torch.stack(by_page, dim=1))
    assert page_lse[0, :, -1].eq(-torch.inf).all()
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()


class Microbatches:
    """A device whose pool is NaN except for the pages of two groups, and these groups' readings."""

    def __init__(self, kind: str, threshold: float | None = None, log_unread: np.ndarray | None = None) -> None:
        shape = PoolShape(capacity_pages=16, layers=1, head_dim=HEAD_DIM, dtype=torch.float32)
        self.pool, self.device = open_device(shape, torch.device("cpu") if kind == "cuda" else None)
        self.pool.key.fill_(torch.nan)
        self.pool.value.fill_(torch.nan)
        self.content = torch.randn(2, 2, 64, HEAD_DIM)  # [groups], K and V
        self.groups = [GroupKey(0, 0), GroupKey(1, 1)]
        self.query = torch.randn(2, 4, HEAD_DIM)  # two rows, two KV heads of two query heads each
        self.readings = [
            Reading(
                group=group,
                pages=np.arange(4 - place),
                seq_len=64,
                microbatch_pages=2,
                threshold=threshold,
                candidates=4,
                log_unread=log_unread,
            )
            for place, group in enumerate(self.groups)
        ]
        self.pages_of = ReadingWave.of(self.readings, room_pages=8)  # for rounds of two pages
        self.begin()

    def begin(self) -> None:
        """Hand over the queries as they are now."""
        self.states = self.device.begin(self.query, 2)
        self.wave = self.device.open_wave(self.states, 0.2, self.pages_of)
        self.flags = self.wave.flags

    def attend(self, index: int) -> tuple[int, ...]:
        """Load and attend one microbatch of both groups; return the parts that were read."""
        loaded = Loaded(np.full((2, 2), -1, dtype=np.int32))
        for place in range(len(self.readings)):
            pages = self.pages_of.round_pages(place, index)
            taken = self.pool.take(page_numbers(0, place, pages)[None], np.ones(1, dtype=np.bool_))
            loaded.slots[place, : len(pages)] = taken.slots[0]
            content = self.content[place].unflatten(1, (4, 16))[:, torch.from_numpy(pages)]
            self.pool.put(taken.slots[0], content[0], content[1])
        future: Future[Loaded] = Future()
        future.set_result(loaded)
        return self.wave.attend(future, index).result(timeout=60).parts

    @property
    def done(self) -> torch.Tensor:
        """Which groups are done by now, [rows, kv_heads]."""
        return self.flags.done.amax(dim=0)

    def check(self, place: int, pages: int) -> None:
        """Check that the group's state is attention over its first pages."""
        group = self.groups[place]
        heads = self.states.heads(group)
        out, lse = attend_pages(self.query[group.row, heads], *self.content[place], range(pages), 0.2)
        assert_close(self.states.out[group.row, heads], out.nan_to_num())
        assert_close(self.states.lse[group.row, heads], lse)


def test_microbatches_add_up_and_nobody_else_s_rows_change(kind: str) -> None:
    made = Microbatches(kind)
    assert made.attend(0) == (0, 1)
    made.check(0, 2)
    assert made.attend(1) == (0, 1)
    made.check(0, 4)
    made.check(1, 3)
    other = made.states.heads(GroupKey(0, 1))
    assert made.states.out[0, other].eq(0).all()
    assert made.states.lse[0, other].eq(-torch.inf).all()
    assert not made.flags.stop[0]
    made.device.close()


def test_a_done_group_is_left_as_it_is_and_the_last_one_sets_the_stop_flag(kind: str) -> None:
    made = Microbatches(kind, threshold=0.9)
    made.content[0, 0, 16:] *= 0  # the first page outweighs all others, which are as light as the lightest read
    made.content[0, 0, :16] = 30 * made.query[0, 0] / made.query[0, 0].norm()
    made.query[0, 1] = made.query[0, 0]
    made.content[1, 0] *= 0  # all pages of the other group weigh the same
    made.begin()
    made.attend(0)
    assert made.done.tolist() == [[1, 1], [1, 0]]
    assert not made.flags.stop[0]
    assert made.states.kept[0, 0] > 0.9
    assert made.states.kept[1, 1] == pytest.approx(0.5)
    assert made.attend(1) == (1,)
    made.check(0, 2)
    made.check(1, 3)
    assert made.done.all()
    assert made.flags.stop[0]
    made.device.close()


def test_estimates_decide_where_they_are_given(kind: str) -> None:
    nothing_left = np.full((2, 2), -20.0)
    made = Microbatches(kind, threshold=0.9, log_unread=nothing_left)
    made.attend(0)
    assert made.done.all()
    assert made.flags.stop[0]
    made.device.close()


def test_states_of_no_rows_are_empty() -> None:
    states = RowStates.empty(torch.empty(0, 4, HEAD_DIM), 2)
    assert states.out.shape == (0, 4, HEAD_DIM)
