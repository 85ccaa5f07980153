"""What a policy that keeps state of requests wants of a prompt once the request decodes."""

from typing import NamedTuple

from torch import Tensor


class LatestRows(NamedTuple):
    """The latest tokens of one request that a policy looks back at, or as many of them as a step has appended."""

    slot: int  # where the layer keeps the request's state
    query: Tensor  # [rows, q_heads, head_dim] of the KV dtype, in host memory
    seq_len: int  # tokens of the request, these included
    block_table: Tensor  # [blocks] int32
