"""A step's batch: with speculative decoding, a row for each token of a request that decodes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.metadata import HybridSparseMetadataBuilder


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(tokens: list[int], lengths: list[int], prefilling: list[bool] | None) -> Any:
    """vLLM's metadata of a step; request r has the blocks 10 r and 10 r + 1."""
    return SimpleNamespace(
        num_reqs=len(tokens),
        is_prefilling=None if prefilling is None else torch.tensor(prefilling),
        causal=True,
        query_start_loc_cpu=int32(0, *torch.tensor(tokens).cumsum(0).tolist()),
        seq_lens=int32(*lengths),
        block_table_tensor=torch.stack([int32(10 * row, 10 * row + 1) for row in range(len(tokens))]),
        slot_mapping=torch.arange(sum(tokens)),
    )


DRAFTS = 2  # at most, for one request


def rows(common: Any, speculates: bool) -> list[list[Any]]:
    """First tokens, lengths, tables and decode flags of the batch's rows."""
    builder = HybridSparseMetadataBuilder.__new__(HybridSparseMetadataBuilder)
    builder._drafts = DRAFTS if speculates else 0
    batch: Any = builder.build(0, common).batch
    starts, lengths, tables, slots, decoding = batch.tensors[:5]
    assert torch.equal(slots, common.slot_mapping), "tokens are stored as vLLM says"
    assert starts.dtype == lengths.dtype == tables.dtype == torch.int32
    return [starts.tolist(), lengths.tolist(), tables[:, 0].tolist(), [bool(flag) for flag in decoding]]


def test_a_token_and_its_drafts_are_rows_of_their_own_and_a_chunk_of_a_prompt_is_one() -> None:
    common = step(tokens=[3, 3, 1, 2], lengths=[40, 103, 9, 50], prefilling=[True, False, False, False])
    assert rows(common, speculates=True) == [
        [0, 3, 4, 5, 6, 7, 8, 9],
        [40, 101, 102, 103, 9, 49, 50],
        [0, 10, 10, 10, 20, 30, 30],
        [False, True, True, True, True, True, True],
    ]


@pytest.mark.parametrize("speculates", [True, False])
def test_without_drafts_rows_are_requests(speculates: bool) -> None:
    common = step(tokens=[1, 7, 1], lengths=[40, 7, 9], prefilling=[False, True, False])
    assert rows(common, speculates) == [[0, 1, 8, 9], [40, 7, 9], [0, 10, 20], [True, False, True]]


def test_what_a_preemption_took_is_computed_again_as_one_row() -> None:
    """vLLM says that such tokens decode if they lie behind the prompt."""
    common = step(tokens=[300, 3, 1, 4], lengths=[340, 103, 9, 50], prefilling=[False] * 4)
    assert rows(common, speculates=True) == [
        [0, 300, 301, 302, 303, 304, 308],
        [340, 101, 102, 103, 9, 50],
        [0, 10, 10, 10, 20, 30],
        [False, True, True, True, True, False],
    ]


@pytest.mark.parametrize("speculates", [True, False])
def test_where_vllm_does_not_say_what_decodes_all_rows_are_exact(speculates: bool) -> None:
    common = step(tokens=[1, 3, 1], lengths=[40, 7, 9], prefilling=None)
    assert rows(common, speculates) == [[0, 1, 4, 5], [40, 7, 9], [0, 10, 20], [False, False, False]]


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])], ids=["all", "some"])
def test_rows_that_see_later_tokens_are_refused(causal: Any) -> None:
    common = step(tokens=[1, 3], lengths=[40, 7], prefilling=[False, True])
    common.causal = causal
    with pytest.raises(ConfigError, match="non-causal attention is not supported"):
        rows(common, speculates=False)
