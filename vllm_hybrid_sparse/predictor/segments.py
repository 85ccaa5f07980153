"""The three segments of a sequence, sink, host and local, and attention within one of them (Fluxion, appendix A.1)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_hybrid_sparse.values import PAGE_TOKENS, RetainedSet


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the segments of one sequence end: tokens [0, sink_end), [sink_end, host_end) and [host_end, tokens).

    The paper's window is the prefill's last 256 tokens and grows during decoding (L_new). Here it moves page by page: a
    page that has left the recent window is a candidate. So the host segment, which is the candidates, grows, and the
    local segment, which holds the new tokens, keeps its size.
    """

    sink_end: int
    host_end: int
    tokens: int

    @classmethod
    def of(cls, retained: RetainedSet, tokens: int) -> "Segments":
        """The segments of a sequence of `tokens` tokens; a short one has no host segment."""
        first_page, end_page = retained.candidate_range(tokens)
        sink_end = min(first_page * PAGE_TOKENS, tokens)
        return cls(sink_end, max(sink_end, min(end_page * PAGE_TOKENS, tokens)), tokens)

    @property
    def host_tokens(self) -> int:
        """L_cpu."""
        return self.host_end - self.sink_end

    @property
    def retained_tokens(self) -> int:
        """L_gpu."""
        return self.tokens - self.host_tokens

    @property
    def sink(self) -> slice:
        """Tokens of the sink segment."""
        return slice(0, self.sink_end)

    @property
    def host(self) -> slice:
        """Tokens of the host segment."""
        return slice(self.sink_end, self.host_end)

    @property
    def local(self) -> slice:
        """Tokens of the local segment, including the current one."""
        return slice(self.host_end, self.tokens)


def in_compute_dtype(tensor: Tensor) -> Tensor:
    """The tensor in float64 if it already is, otherwise in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def by_group(query: Tensor, kv_heads: int) -> Tensor:
    """[query heads, ...] as [KV heads, heads of a group, ...]."""
    return query.reshape(kv_heads, query.shape[0] // kv_heads, *query.shape[1:])


def attend_segment(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query head within one segment, with its log-sum-exp.

    query          [q_heads, head_dim]            f32 | f64
    keys, values   [kv_heads, tokens, head_dim]   same dtype
    returns        out [q_heads, head_dim], lse [q_heads] natural log; zeros and -inf if there are no tokens
    """
    scores = scale * by_group(query, keys.shape[0]) @ keys.transpose(1, 2)
    if keys.shape[1] == 0:
        return torch.zeros_like(query), query.new_full((query.shape[0],), float("-inf"))
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse[..., None]).exp() @ values
    return out.reshape(query.shape), lse.reshape(-1)
