"""A cache with room answers as Transformers' own does."""

import pytest
import torch
from transformers import DynamicCache

from benchmarks.accuracy.roomy_cache import roomy_cache
from tests.benchmarks.tiny import tiny_model


@torch.inference_mode()
def test_a_model_sees_what_it_sees_of_a_dynamic_cache() -> None:
    model, ids = tiny_model(), torch.arange(40)[None]
    logits = []
    for cache in (DynamicCache(), roomy_cache(2, 50)):
        model(ids[:, :30], past_key_values=cache)
        model(ids[:, 30:34], past_key_values=cache)
        cache.crop(-4)
        steps = [model(ids[:, place : place + 1], past_key_values=cache).logits for place in range(30, 40)]
        assert cache.get_seq_length() == 40
        logits.append(torch.cat(steps))
    torch.testing.assert_close(logits[1], logits[0])


def test_more_than_there_is_room_for_is_refused() -> None:
    cache = roomy_cache(1, 5)
    part = torch.zeros(1, 2, 3, 4)
    cache.update(part, part, 0)
    with pytest.raises(ValueError, match="capacity_tokens=5: the sequence has 6"):
        cache.update(part, part, 0)
