"""How a step is divided between the native core and the device, wherever its decode rows stand."""

import pytest
import torch

from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch

BLOCK_TOKENS = 32
TABLE = torch.tensor([[5, 3], [2, 7], [6, 1]], dtype=torch.int32)


def slots(request: int, first: int, end: int) -> list[int]:
    """Where the tokens of a request from `first` to `end` are stored."""
    return [int(TABLE[request, t // BLOCK_TOKENS]) * BLOCK_TOKENS + t % BLOCK_TOKENS for t in range(first, end)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_its_parts_follow_the_decode_row(place: int) -> None:
    """Two chunks of prompts, tokens 20 to 40 of one and 0 to 10 of the other, and a row that decodes token 49."""
    spans = [(20, 40), (0, 10)]
    spans.insert(place, (49, 50))
    lengths = torch.tensor([end for _, end in spans], dtype=torch.int32)
    stored = [slots(request, *span) for request, span in enumerate(spans)]
    starts = torch.tensor([0, *(end - first for first, end in spans)]).cumsum(0).to(torch.int32)
    batch = TieredBatch.from_tensors(
        starts,
        lengths,
        TABLE,
        torch.tensor([slot for row in stored for slot in row]),
        torch.tensor([request == place for request in range(3)]),
        torch.tensor([4, 8, 9], dtype=torch.int32),
        written_pages=(90, 91),
    )
    assert (batch.rows, batch.seq_lens) == ((int(starts[place]),), (50,))
    assert batch.new_slots == tuple(stored[place])
    assert batch.block_tables.tolist() == [TABLE[place].tolist()]
    assert batch.slots == ([4, 8, 9][place],)
    by_prompts = {slot // 16 for request, row in enumerate(stored) if request != place for slot in row}
    assert batch.written_pages == (*sorted(by_prompts), 90, 91)
