"""What the CPU kernel refuses, before it touches memory."""

from typing import Any

import pytest
import torch

from tests.kernels.served_layer import ServedLayer, Shape
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention, native_selection, supported_isas
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RIGHT: dict[str, Any] = {
    "dtype": torch.float32,
    "num_q_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "block_tokens": 32,
    "scale": 0.125,
}


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"dtype": torch.float64}, "dtype=torch.float64: must be bfloat16, float16, float32 or float8_e4m3fn"),
        ({"num_q_heads": 5}, "num_q_heads=5: must be a multiple of num_kv_heads=2"),
        ({"num_q_heads": 0}, "num_q_heads=0: must be a multiple of num_kv_heads=2"),
        ({"num_kv_heads": 0}, "num_kv_heads=0"),
        ({"head_dim": 40}, "head_dim=40: must be a multiple of 16"),
        ({"head_dim": 528}, "head_dim=528"),
        ({"block_tokens": 24}, "block_tokens=24: must be a multiple of 16"),
        ({"scale": 0.0}, "scale=0.0: must be above 0 and finite"),
        ({"scale": -0.125}, "scale=-0.125: must be above 0"),
        ({"scale": float("nan")}, "scale=nan: must be above 0"),
        ({"scale": float("inf")}, "scale=inf: must be above 0 and finite"),
        ({"summary": "mean"}, "summary='mean': must be .*minmax.*cuboid_mean"),
        ({"num_threads": 0}, "num_threads=0: must be at least 1"),
        ({"isa": "neon"}, "isa='neon': must be auto or .*scalar"),
    ],
)
def test_a_layer_that_cannot_be_served_is_refused(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(KernelError, match=rule):
        NativeAttention(**(RIGHT | wrong))


def test_pages_without_summaries_cannot_be_ranked() -> None:
    layer = ServedLayer(Shape(summary="none"), num_blocks=4)
    with pytest.raises(KernelError, match="summary=none: must be one that pages can be ranked by"):
        layer.step([(layer.start(), 40)], selection=SelectionSpec(ranked=True, max_pages=1))


def test_an_unknown_instruction_set_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(KernelError, match=", ".join(supported_isas())):
        NativeAttention(**RIGHT, isa="sse9")


BATCH: dict[str, torch.Tensor] = {
    "query_start_loc": torch.tensor([0, 1, 3], dtype=torch.int32),
    "seq_lens": torch.tensor([1, 2], dtype=torch.int32),
    "block_table": torch.tensor([[0], [1]], dtype=torch.int32),
    "slot_mapping": torch.tensor([0, 32, 33], dtype=torch.int64),
    "decode_mask": torch.tensor([True, False]),
}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query_start_loc", torch.tensor([0, 1, 3])),
        ("query_start_loc", torch.tensor([0, 3], dtype=torch.int32)),
        ("seq_lens", torch.tensor([1, 2])),
        ("block_table", torch.tensor([0, 1], dtype=torch.int32)),
        ("block_table", torch.tensor([[0]], dtype=torch.int32)),
        ("block_table", torch.zeros(4, 2, dtype=torch.int32).T),
        ("slot_mapping", torch.tensor([0, 32, 33], dtype=torch.int32)),
        ("slot_mapping", torch.tensor([0, 32])),
        ("decode_mask", torch.tensor([True])),
        ("decode_mask", torch.tensor([[True, False], [True, False]])),
        ("decode_mask", torch.tensor(True)),
        ("decode_mask", torch.zeros(2, dtype=torch.bool, device="meta")),
        ("decode_mask", torch.zeros(2)),
        ("decode_mask", torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_a_batch_of_the_wrong_shape_is_refused_by_name(name: str, wrong: torch.Tensor) -> None:
    with pytest.raises(KernelError, match=name):
        NativeBatch.from_tensors(**(BATCH | {name: wrong}))


@pytest.mark.parametrize(
    ("starts", "seq_lens", "rule"),
    [
        ([1, 2, 3], [1, 2], r"query_start_loc=\[1, 2, 3\]: must begin with 0 and never descend"),
        ([-1, 1, 3], [9, 9], r"query_start_loc=\[-1, 1, 3\]: must begin with 0 and never descend"),
        ([0, 4, 3], [9, 9], r"query_start_loc=\[0, 4, 3\]: must begin with 0 and never descend"),
        ([0, 1, 3], [1, 1], "seq_lens=1: must be at least the 2 query tokens of request 1"),
        ([0, 1, 3], [1, 0], "seq_lens=0: must be at least the 2 query tokens of request 1"),
        ([0, 0, 3], [-1, 3], "seq_lens=-1: must be at least the 0 query tokens of request 0"),
        ([0, 1, 3], [-1, 2], "seq_lens=-1: must be at least the 1 query tokens of request 0"),
    ],
)
def test_query_tokens_are_the_last_ones_of_each_request(starts: list[int], seq_lens: list[int], rule: str) -> None:
    wrong = {"query_start_loc": starts, "seq_lens": seq_lens}
    given = {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in wrong.items()}
    with pytest.raises(KernelError, match=f"^{rule}$"):
        NativeBatch.from_tensors(**(BATCH | given))


@pytest.mark.parametrize(
    ("starts", "seq_lens"),
    [
        ([0, 1, 1], [1, 0]),  # vLLM's padding: no tokens of no request
        ([0, 1, 1], [1, 7]),
        ([0, 1, 2], [1, 0]),  # stored, not attended
        ([0, 0, 3], [0, 3]),
        ([0, 0, 0], [0, 0]),
    ],
)
def test_padding_and_rows_that_are_only_stored_are_taken(starts: list[int], seq_lens: list[int]) -> None:
    given = {"query_start_loc": starts, "seq_lens": seq_lens}
    batch = NativeBatch.from_tensors(
        **(BATCH | {name: torch.tensor(numbers, dtype=torch.int32) for name, numbers in given.items()})
    )
    assert batch.num_tokens == starts[-1]
    assert batch.longest == max(seq_lens)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("query", torch.zeros(3, 4, 64, dtype=torch.float16)),
        ("query", torch.zeros(2, 4, 64)),
        ("query", torch.zeros(3, 4, 32)),
        ("query", torch.zeros(3, 64, 4).transpose(1, 2)),
        ("query", torch.zeros(3, 4, 64, device="meta")),
        ("key", torch.zeros(3, 4, 64)),
        ("value", torch.zeros(3, 128)),
        ("output", torch.zeros(3, 2, 64)),
        ("kv_cache", torch.zeros(2, 64, dtype=torch.uint8)),
        ("kv_cache", torch.zeros(2, 2**20, dtype=torch.uint8, device="meta")),
        ("sinks", torch.zeros(3)),
        ("sinks", torch.zeros(4, device="meta")),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, wrong: torch.Tensor) -> None:
    layer = ServedLayer(Shape(), num_blocks=2)
    right: dict[str, Any] = {
        "query": torch.zeros(3, 4, 64),
        "key": torch.zeros(3, 2, 64),
        "value": torch.zeros(3, 2, 64),
        "output": torch.zeros(3, 4, 64),
        "kv_cache": layer.kv_cache,
        "batch": NativeBatch.from_tensors(**BATCH),
        "selection": SelectionSpec(),
        "retained": RetainedSet(),
    }
    with pytest.raises(KernelError, match=f"^{name}"):
        layer.attention.forward(**(right | {name: wrong}))


@pytest.mark.parametrize(
    ("selection", "retained", "rule"),
    [
        (SelectionSpec(), None, "retained=None: must be given with a SelectionSpec"),
        (
            native_selection(SelectionSpec(), RetainedSet()),
            RetainedSet(window_tokens=128),
            r"retained=RetainedSet\(.*window_tokens=128\): must be None with a selection that has its own",
        ),
    ],
)
def test_a_retained_set_is_given_once(selection: Any, retained: RetainedSet | None, rule: str) -> None:
    layer = ServedLayer(Shape(), num_blocks=2)
    query, new, batch = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64), NativeBatch.from_tensors(**BATCH)
    with pytest.raises(KernelError, match=f"^{rule}$"):
        layer.attention.forward(query, new, new, layer.kv_cache, batch, selection, retained, query.clone())


def test_a_row_of_the_cache_holds_a_whole_block() -> None:
    layer = ServedLayer(Shape(), num_blocks=2)
    block_bytes = Shape().num_kv_heads * layer.attention.layout.head_block_bytes
    whole = layer.kv_cache[:, :block_bytes].contiguous()
    assert layer.attention.block_stride(whole) == block_bytes
    with pytest.raises(KernelError, match=f"^kv_cache: a row of {block_bytes - 1} bytes is too short for a block of"):
        layer.attention.block_stride(whole[:, :-1].contiguous())


def test_a_key_without_its_value_is_refused() -> None:
    layer = ServedLayer(Shape(), num_blocks=2)
    query, new, batch = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64), NativeBatch.from_tensors(**BATCH)
    for key, value in ((new, None), (None, new)):
        with pytest.raises(KernelError, match="=None: give both key and value, or neither"):
            layer.attention.forward(
                query, key, value, layer.kv_cache, batch, SelectionSpec(), RetainedSet(), query.clone()
            )


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"slot_mapping": torch.tensor([0, 32, 64])}, "slot_mapping=64: must be below 2 blocks of 32 tokens"),
        ({"seq_lens": torch.tensor([33, 2], dtype=torch.int32)}, "seq_lens=33: the block table names 1 blocks of 32"),
    ],
)
def test_what_lies_outside_the_cache_is_refused(wrong: dict[str, torch.Tensor], rule: str) -> None:
    layer = ServedLayer(Shape(), num_blocks=2)
    query, new = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64)
    batch = NativeBatch.from_tensors(**(BATCH | wrong))
    with pytest.raises(KernelError, match=f"^{rule}"):
        layer.attention.forward(query, new, new, layer.kv_cache, batch, SelectionSpec(), RetainedSet(), query.clone())
