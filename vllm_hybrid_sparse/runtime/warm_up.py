"""Kernels run once beforehand, so that no request waits for Triton.

vLLM's runner V2 warms up with requests of a few tokens: no page of theirs is filled, none is a candidate, and no block
has a frame. Runner V1, and V2 under --enforce-eager, warm up with no request at all. So everything that serving
launches is launched here.
"""

import numpy as np
import torch

from vllm_hybrid_sparse.kernels.copy.gpu import TokenFrames, load_pages, store_pages, store_tokens
from vllm_hybrid_sparse.kernels.frame_attention.gpu import attend_frames
from vllm_hybrid_sparse.kernels.merge.choice import choose_merge
from vllm_hybrid_sparse.kernels.paged_attention.native import NativeAttention
from vllm_hybrid_sparse.kernels.sparse_attention.gpu import attend_slots
from vllm_hybrid_sparse.kernels.verify.gpu import verify
from vllm_hybrid_sparse.kernels.verify.progress import Progress
from vllm_hybrid_sparse.memory.device_directory import DeviceDirectory
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.runtime.ranking import DeviceRanking
from vllm_hybrid_sparse.runtime.residency import Residency
from vllm_hybrid_sparse.runtime.tiers import DeviceTier
from vllm_hybrid_sparse.values import PAGE_TOKENS, SelectionSpec

_CANDIDATES = 64  # pages, of the context that is made up


@torch.inference_mode()
def warm_up(tier: DeviceTier, attention: NativeAttention, source: HostPages) -> None:
    """Launch kernels of new tokens, filled pages, a prompt's later chunks, and ranked, resident and two-tier rows.

    They serve one row of a context that nobody has. What the blocks of the host store hold is read, and nothing of it
    is kept; no request may have begun.

    source   the first layer's
    """
    query = torch.zeros(
        1, attention.num_q_heads, attention.head_dim, dtype=attention.dtype, device=tier.pool.key.device
    )
    no_page = torch.full((1,), -1, dtype=torch.int64, device=query.device)
    for move in (load_pages, store_pages):
        move(source.elements, no_page, no_page.to(torch.int32), tier.pool.key, tier.pool.value)
    _store_nowhere(source, query[:, : tier.kv_heads], None)
    state = torch.zeros(query.shape, device=query.device), torch.zeros(query.shape[:2], device=query.device)
    _, merge_states = choose_merge(query.device.type, torch.float32)
    merge_states(*state, *state)
    if tier.ranking is None:
        _warm_up_slots(tier, query, attention.scale)
        _warm_up_look(tier.settings.selection, state[1], tier.kv_heads)
    else:
        _warm_up_ranked(tier, tier.ranking, source, query, attention.scale)
    if tier.residency is not None:
        _warm_up_resident(tier.residency, source, query, attention)
    if tier.ranking is not None and tier.residency is not None:
        _warm_up_runs(tier.ranking.directory, tier.residency.shape.slots)


def _store_nowhere(source: HostPages, new: torch.Tensor, frames: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Store a token, [1, kv_heads, head_dim], nowhere in the host store, and in the first of some frames if given."""
    none = torch.zeros(1, dtype=torch.int32, device=new.device)
    nowhere = torch.full((1, new.shape[1]), -1, dtype=torch.int64, device=new.device)
    store_tokens(source.elements, nowhere, none, new, new, None if frames is None else TokenFrames(*frames, none, none))


def _warm_up_slots(tier: DeviceTier, query: torch.Tensor, scale: float) -> None:
    """Attend to a page that lies in no slot, as two-tier rows attend to those that were loaded."""
    _, q_heads, _ = query.shape
    none = torch.zeros(1, tier.kv_heads, 1, dtype=torch.int32, device=query.device)
    lse = torch.full((1, q_heads), -torch.inf, device=query.device)
    keeps_scores = tier.settings.salience is not None
    attend_slots(
        query,
        tier.pool.key,
        tier.pool.value,
        none - 1,
        none,
        none[..., 0].to(torch.uint8),
        torch.zeros(query.shape, device=query.device),
        lse,
        lse[..., None].clone(),
        scale=scale,
        token_scores=torch.empty(1, q_heads, PAGE_TOKENS, device=query.device) if keeps_scores else None,
    )


def _warm_up_look(selection: SelectionSpec, lse: torch.Tensor, kv_heads: int) -> None:
    """Look at what a row has read, as two-tier rows do where a threshold ends their reading."""
    if selection.threshold == 1:
        return
    no_page = torch.zeros(lse.shape[0], kv_heads, dtype=torch.int32, device=lse.device)
    progress = Progress.begin(no_page, no_page, lse.shape[1])
    log_left = lse if selection.estimated_remainder else None
    verify(lse, lse[..., None], progress, threshold=selection.threshold, log_left=log_left)
    progress.active.item()  # so that the kernel has ended, which writes the progress's flag in host memory


def _warm_up_ranked(
    tier: DeviceTier, ranking: DeviceRanking, source: HostPages, query: torch.Tensor, scale: float
) -> None:
    """Attend in the first layer to the store's first blocks, as many as the context has, then forget them."""
    retained = tier.settings.retained
    tokens = retained.sink_tokens + retained.window_tokens + _CANDIDATES * PAGE_TOKENS
    of_block = source.pages_per_block * PAGE_TOKENS
    blocks = min(-(-tokens // of_block), source.num_pages // source.pages_per_block)
    table = np.arange(blocks, dtype=np.int32)
    lengths = [min(tokens, blocks * of_block)]
    ranking.begin_step([table], lengths, [])
    try:
        ranking.encode_blocks(0, table[:1].tolist())
        for rows in ranking.rows([0], [table], lengths):
            ranking.attend(0, query, rows, torch.empty_like(query), scale)
    finally:
        ranking.drop_numbers()
        tier.forget_blocks(table.tolist())
    ranking.begin_step([], [], [])  # it forgets these pages, as later steps forget what prompts write


def _warm_up_runs(directory: DeviceDirectory, length: int) -> None:
    """Take a run of slots out of use and give it back, as for frames, in a directory that serves nothing else."""
    of_one_run = DeviceDirectory(1, 1, 1, 1, length, directory.state.slots.device, room=directory.state.room)
    first = np.zeros(1, dtype=np.int32)
    of_one_run.set_aside(first, length)
    of_one_run.give_back(first, length)


def _warm_up_resident(residency: Residency, source: HostPages, query: torch.Tensor, attention: NativeAttention) -> None:
    """Attend to a frame, whatever it holds. What is stored goes nowhere in the host store, and to no block's frame."""
    frames = residency.frames(0)
    device = query.device
    none = torch.zeros(1, dtype=torch.int32, device=device)
    _store_nowhere(source, query[:, : attention.num_kv_heads], frames)
    tokens = residency.block_tokens
    lengths = torch.full((1,), tokens, dtype=torch.int32, device=device)
    attend_frames(query, *frames, none[None], lengths, torch.empty_like(query), scale=attention.scale, longest=tokens)
