"""What the CPU kernel writes, and that it reads nothing else: packing, summaries, skipped rows, blocks used again."""

from collections.abc import Sequence

import pytest
import torch

from tests.kernels.served_layer import Request, ServedLayer, Shape
from tests.kernels.step_checks import check_step
from vllm_hybrid_sparse.errors import KernelError
from vllm_hybrid_sparse.kernels.paged_attention.native import supported_isas
from vllm_hybrid_sparse.kernels.summarize.reference import summarize_pages
from vllm_hybrid_sparse.settings import SUMMARIES
from vllm_hybrid_sparse.values import RetainedSet, SelectionSpec

RETAINED = RetainedSet(sink_tokens=16, window_tokens=32)
TOPK = SelectionSpec(ranked=True, max_pages=3)
PROGRESSIVE = SelectionSpec(ranked=True, threshold=0.9, microbatch_pages=2)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


class StoringLayer(ServedLayer):
    """A layer whose single rows attend to nothing: a device decodes them."""

    def lengths(self, requests: Sequence[Request], query_lens: Sequence[int]) -> list[int]:
        told = super().lengths(requests, query_lens)
        return [0 if query_len == 1 else length for query_len, length in zip(query_lens, told, strict=True)]


def check_memory(layer: ServedLayer, request: Request) -> None:
    """Check bit for bit that a request's packed cache holds its K and V, and the summary of every full page."""
    layout, block_tokens, num_tokens = layer.shape.layout, layer.shape.block_tokens, len(request.key)
    for index, block in enumerate(request.blocks):
        key, value, summaries = layout.unpack(layer.kv_cache[block], layer.shape.num_kv_heads)
        start = index * block_tokens
        stored = min(block_tokens, num_tokens - start)
        assert torch.equal(key[:stored], request.key[start : start + stored])
        assert torch.equal(value[:stored], request.value[start : start + stored])
        full_pages = stored // 16
        for kv_head in range(layer.shape.num_kv_heads):
            expected = summarize_pages(request.key[start : start + 16 * full_pages, kv_head], layout.summary)
            assert torch.equal(summaries[kv_head, :full_pages], expected)


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean"])
@pytest.mark.parametrize(("head_dim", "block_tokens"), [(16, 16), (80, 32), (64, 128), (128, 32)])
def test_blocks_hold_what_was_appended(
    isa: str, dtype: torch.dtype, summary: str, head_dim: int, block_tokens: int
) -> None:
    shape = Shape(isa=isa, dtype=dtype, summary=summary, head_dim=head_dim, block_tokens=block_tokens)
    layer = ServedLayer(shape, num_blocks=40)
    requests = [layer.start(), layer.start()]
    for chunks in ((1, 40), (14, 1), (1, 90), (16, 1), (100, 17)):
        layer.step(list(zip(requests, chunks, strict=True)))
        for request in requests:
            check_memory(layer, request)


@pytest.mark.parametrize("summary", ["minmax", "cuboid_mean"])
def test_rows_that_are_only_stored_fill_pages_whose_summaries_are_right(summary: str) -> None:
    layer = StoringLayer(Shape(summary=summary), num_blocks=10)
    requests = [layer.start(), layer.start()]
    layer.step(list(zip(requests, (40, 90), strict=True)))
    for _ in range(60):
        layer.step([(request, 1) for request in requests])
    for request in requests:
        check_memory(layer, request)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_long_prefill_is_stored_in_parallel(num_threads: int) -> None:
    layer = ServedLayer(Shape(num_threads=num_threads, head_dim=16), num_blocks=80)
    requests = [layer.start(), layer.start(), layer.start()]
    layer.step(list(zip(requests, (7, 5, 3), strict=True)))
    layer.step(list(zip(requests, (1000, 3, 777), strict=True)))
    for request in requests:
        check_memory(layer, request)


def test_sizes_are_those_of_the_documented_layout() -> None:
    for dtype in DTYPES:
        for summary in ("minmax", "cuboid_mean"):
            shape = Shape(dtype=dtype, summary=summary, head_dim=80, block_tokens=128)
            native, layout = ServedLayer(shape, num_blocks=1).attention.layout, shape.layout
            assert native.pages_per_block == layout.pages_per_block
            assert native.page_bytes == layout.page_bytes
            assert native.summary_bytes == layout.summary_bytes
            assert native.head_block_bytes == layout.head_block_bytes


def test_nothing_is_written_outside_the_blocks_of_the_batch() -> None:
    layer = ServedLayer(Shape(), num_blocks=20, row_padding_bytes=192)
    request = layer.start()
    layer.step([(request, 150)], selection=TOPK, retained=RETAINED)
    skipped = layer.step([(request, 1)], selection=TOPK, retained=RETAINED)
    check_step(layer, skipped)
    storage = layer.kv_cache.as_strided((20, layer.kv_cache.stride(0)), (layer.kv_cache.stride(0), 1))
    assert (storage[:, layer.kv_cache.shape[1] :] == 0xFF).all()
    others = [block for block in range(20) if block not in request.blocks]
    assert (layer.kv_cache[others] == 0xFF).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("selection", [SelectionSpec(), TOPK, PROGRESSIVE], ids=["dense", "topk", "progressive"])
def test_a_block_used_again_shows_nothing_of_its_last_request(dtype: torch.dtype, selection: SelectionSpec) -> None:
    layer = ServedLayer(Shape(dtype=dtype), num_blocks=14)
    first = layer.start()
    layer.step([(first, 400)], key_offset=50.0)
    used = set(first.blocks)
    layer.finish(first)
    second = layer.start()
    layer.step([(second, 1)])
    for chunk in (10, 200, 1, 7, 100):
        check_step(layer, layer.step([(second, chunk)], decode=False))
    for _ in range(3):
        assert check_step(layer, layer.step([(second, 1)], selection=selection, retained=RETAINED)) == []
    assert set(second.blocks) <= used
    check_memory(layer, second)


def forward_rows(layer: ServedLayer, request: Request, slots: list[int]) -> torch.Tensor:
    """Decode the latest token of a request once more, storing other K and V at `slots`."""
    query, key, value = layer.random(1, 4, 64), layer.random(1, 2, 64), layer.random(1, 2, 64)
    output = torch.full_like(query, torch.nan)
    batch = layer.batch([request], [1], [True], slots)
    layer.attention.forward(query, key, value, layer.kv_cache, batch, TOPK, RETAINED, output)
    return output


def test_a_negative_slot_stores_nothing_and_attention_goes_on() -> None:
    layer = ServedLayer(Shape(), num_blocks=10)
    request = layer.start()
    layer.step([(request, 200)])
    before = layer.kv_cache.clone()
    assert forward_rows(layer, request, [-1]).isfinite().all()
    assert torch.equal(layer.kv_cache, before)
    check_memory(layer, request)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negative_slots_in_the_middle_of_a_page_leave_their_tokens_alone(dtype: torch.dtype) -> None:
    layer = ServedLayer(Shape(dtype=dtype, num_q_heads=2), num_blocks=10)
    request = layer.start()
    layer.step([(request, 64)])
    written = [3, 4, 20, 31, 40]
    slots = [-1] * 64
    for position in written:
        slots[position] = request.blocks[position // 32] * 32 + position % 32
    query, key, value = layer.random(64, 2, 64), layer.random(64, 2, 64), layer.random(64, 2, 64)
    batch = layer.batch([request], [64], [False], slots)
    layer.attention.forward(query, key, value, layer.kv_cache, batch, TOPK, RETAINED, torch.empty_like(query))
    request.key[written], request.value[written] = (layer.shape.layout.stored(part[written]) for part in (key, value))
    stored_key, stored_value, summaries = layer.shape.layout.unpack(layer.kv_cache[request.blocks[0]], 2)
    assert torch.equal(stored_key, request.key[:32])
    assert torch.equal(stored_value, request.value[:32])
    for kv_head in range(2):
        # Page 1 was written up to its last token, so its summary is new.
        assert torch.equal(summaries[kv_head, 1:], summarize_pages(request.key[16:32, kv_head], "minmax"))


def test_a_shared_prefix_is_read_by_both_requests() -> None:
    layer = ServedLayer(Shape(), num_blocks=30)
    first = layer.start()
    layer.step([(first, 256)])
    second = Request(first.key.clone(), first.value.clone(), list(first.blocks))
    for _ in range(3):
        step = layer.step([(first, 1), (second, 1)], selection=TOPK, retained=RETAINED)
        assert check_step(layer, step) == []
    assert first.blocks[:8] == second.blocks[:8]
    assert first.blocks[8:] != second.blocks[8:]


@pytest.mark.parametrize("summary", SUMMARIES)
def test_summaries_of_keys_written_by_others_are_made_anew(summary: str) -> None:
    layer = ServedLayer(Shape(summary=summary, num_threads=2), num_blocks=6)
    rows = [layer.start(), layer.start()]
    layer.step([(request, 3 * layer.shape.block_tokens) for request in rows])
    before = layer.kv_cache.clone()
    pages_bytes = layer.shape.num_kv_heads * layer.attention.layout.pages_per_block * layer.attention.layout.page_bytes
    layer.kv_cache[:, pages_bytes:] = 0x5A
    layer.attention.summarize(layer.kv_cache, torch.tensor(rows[0].blocks, dtype=torch.int32))
    for request, made_anew in zip(rows, (True, False), strict=True):
        assert torch.equal(layer.kv_cache[request.blocks], before[request.blocks]) == made_anew


@pytest.mark.parametrize("blocks", [torch.tensor([6], dtype=torch.int32), torch.tensor([0])], ids=["beyond", "int64"])
def test_blocks_to_summarise_must_exist(blocks: torch.Tensor) -> None:
    layer = ServedLayer(Shape(), num_blocks=6)
    with pytest.raises(KernelError, match="blocks="):
        layer.attention.summarize(layer.kv_cache, blocks)


@pytest.mark.parametrize("starts", [[], [0], [1, 2], [0, 1], [0, 2, 1, 2]])
def test_sequences_to_summarise_must_be_of_all_blocks(starts: list[int]) -> None:
    layer = ServedLayer(Shape(), num_blocks=6)
    blocks, given = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([3, 4], starts))
    with pytest.raises(KernelError, match=r"starts=\[.*\]: must ascend from 0 to the number of blocks, 2"):
        layer.attention.summarize(layer.kv_cache, blocks, given)
