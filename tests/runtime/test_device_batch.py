"""A step divided into chunks and decode rows, from block tables in host memory."""

import pytest
import torch

from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.runtime.device_batch import DeviceBatch

TABLES = [[4, 2], [7], [1, 3, 5], [6]]


def divided(query_lens: list[int], seq_lens: list[int], decodes: list[bool]) -> DeviceBatch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return DeviceBatch.from_tensors(starts, lengths, torch.tensor(decodes), TABLES[: len(seq_lens)], 32)


def test_rows_of_one_token_decode_once_their_prompt_is_computed() -> None:
    batch = divided([1, 10, 1, 1], [40, 12, 70, 5], [True, True, False, True])
    assert batch.decode_tokens == (0, 12)
    assert batch.decode.rows == (0, 1)
    assert batch.decode.seq_lens == (40, 5)
    assert [table.tolist() for table in batch.decode.block_tables] == [[4, 2], [6, 0]]
    assert batch.decode.new_slots == (2 * 32 + 7, 6 * 32 + 4)
    assert batch.decode.native.num_tokens == 2
    chunks = [(chunk.first_token, chunk.tokens, chunk.context_tokens) for chunk in batch.chunks]
    assert chunks == [(1, 10, 2), (11, 1, 69)]


def test_a_chunk_s_pages_are_the_store_s() -> None:
    (chunk,) = divided([30], [50], [False]).chunks
    assert chunk.seq_len == 50
    assert chunk.written_pages.tolist() == [9, 4, 5]  # tokens 20 to 49: pages 1 to 3 of the request
    assert chunk.store_pages(0, 2).tolist() == [8, 9]
    batch = divided([30], [50], [False])
    assert batch.decode.written_pages == (9, 4, 5)
    assert (batch.decode.rows, batch.decode_tokens) == ((), ())


def test_a_step_without_requests_is_empty() -> None:
    batch = divided([], [], [])
    assert (batch.chunks, batch.decode_tokens, batch.decode.rows) == ((), (), ())


def test_a_block_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(KernelError, match="block_tables=2 blocks of a request of 65 tokens: too few"):
        divided([1], [65], [True])
