"""Keys and values in eight bits (e4m3): how every number is stored, and how every byte is read."""

import pytest
import torch

from tests.kernels.served_layer import ServedLayer, Shape
from vllm_hybrid_sparse.kernels.paged_attention.native import supported_isas

LARGEST = 448.0


def layer_of(head_dim: int, isa: str = "auto") -> ServedLayer:
    shape = Shape(dtype=torch.float8_e4m3fn, num_q_heads=1, num_kv_heads=1, head_dim=head_dim, isa=isa, summary="none")
    return ServedLayer(shape, num_blocks=4)


def tokens_of(values: torch.Tensor) -> torch.Tensor:
    """These values, with queries and keys of zero: [tokens, 3, head_dim]."""
    return torch.stack((torch.zeros_like(values), torch.zeros_like(values), values), dim=1)


def test_every_bf16_is_stored_as_the_nearest_and_no_larger_than_the_largest() -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(128, 512)
    layer = layer_of(head_dim=512)
    request = layer.start()
    layer.step([(request, 128)], tokens=tokens_of(numbers.float()))
    stored = torch.cat([layer.shape.layout.unpack(layer.kv_cache[block], 1)[1] for block in request.blocks])[:, 0]
    expected = numbers.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).to(torch.bfloat16)
    torch.testing.assert_close(stored, expected, rtol=0, atol=0, equal_nan=True)
    assert stored.nan_to_num().abs().max() == LARGEST


@pytest.mark.parametrize("isa", supported_isas())
def test_every_byte_is_read_as_the_number_it_is(isa: str) -> None:
    numbers = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()[None]
    layer = layer_of(head_dim=256, isa=isa)
    step = layer.step([(layer.start(), 1)], tokens=tokens_of(numbers))  # the token sees only itself
    torch.testing.assert_close(step.output[0].float(), numbers, rtol=0, atol=0, equal_nan=True)
