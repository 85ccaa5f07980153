"""Page summaries in plain torch."""

import torch
from torch import Tensor

from vllm_hybrid_sparse.values import PAGE_TOKENS


def summarize_pages(keys: Tensor, summary: str) -> Tensor:
    """Summarise each page of 16 keys by its bounding cuboid.

    minmax (Quest): max_d and min_d, the elementwise bounds. cuboid_mean (ArkVale, PSA): the centre (min_d + max_d) / 2,
    computed in float32 and rounded once to the dtype of the keys.

    keys           [tokens, head_dim]   bf16 | f16 | f32; tokens a multiple of 16
    returns        [pages, vectors, head_dim], same dtype: vectors are (max, min), or (centre,); empty for no tokens
    """
    pages = keys.reshape(-1, PAGE_TOKENS, keys.shape[-1])
    upper, lower = pages.amax(dim=1), pages.amin(dim=1)
    if summary == "minmax":
        return torch.stack((upper, lower), dim=1)
    assert summary == "cuboid_mean"
    centre = (lower.float() + upper.float()) / 2
    return centre.to(keys.dtype).unsqueeze(1)
