"""Segments are the pages of the retained set and the candidates, whatever the length."""

import pytest
import torch

from tests.tolerances import assert_close
from vllm_hybrid_sparse.predictor.segments import Segments, attend_segment
from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 63, 64, 65, 319, 320, 335, 336, 337, 1000])
@pytest.mark.parametrize("sink", [0, 64])
def test_segments_cover_the_sequence_and_the_host_is_the_candidates(tokens: int, sink: int) -> None:
    retained = RetainedSet(sink_tokens=sink, window_tokens=256)
    segments = Segments.of(retained, tokens)
    assert 0 <= segments.sink_end <= segments.host_end <= segments.tokens == tokens
    every = [*range(tokens)]
    assert every[segments.sink] + every[segments.host] + every[segments.local] == every
    first, end = retained.candidate_range(tokens)
    assert segments.host_tokens == (end - first) * PAGE_TOKENS
    assert segments.retained_tokens == tokens - segments.host_tokens
    if segments.host_tokens:
        assert every[segments.host][0] == first * PAGE_TOKENS


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_attention_within_a_segment(group: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(2 * group, 8, generator=generator, dtype=torch.float64)
    keys, values = (torch.randn(2, tokens, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    out, lse = attend_segment(query, keys, values, 0.3)
    for head in range(2 * group):
        scores = 0.3 * keys[head // group] @ query[head]
        expected = torch.softmax(scores, 0) @ values[head // group] if tokens else torch.zeros(8, dtype=torch.float64)
        assert_close(out[head], expected)
        assert_close(lse[head], torch.logsumexp(scores, 0) if tokens else torch.tensor(float("-inf")).double())
