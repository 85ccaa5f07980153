"""Builds the kernel's batch of one step from vLLM's metadata."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)

from vllm_hybrid_sparse.errors import ConfigError
from vllm_hybrid_sparse.glue.settings import settings_of
from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch
from vllm_hybrid_sparse.runtime.block_mirror import BlockMirror
from vllm_hybrid_sparse.runtime.device_batch import DeviceBatch
from vllm_hybrid_sparse.runtime.host import HostRuntime, host_runtime
from vllm_hybrid_sparse.runtime.requests import RequestSlots
from vllm_hybrid_sparse.runtime.residency import Divide
from vllm_hybrid_sparse.runtime.tiered_batch import TieredBatch


@dataclass(slots=True)
class HybridSparseMetadata(AttentionMetadata):
    """What a layer needs to know about the step."""

    # The second if an emulated device shares the decode rows, the third on CUDA; None in CUDA's made-up steps.
    batch: NativeBatch | TieredBatch | DeviceBatch | None


class HybridSparseMetadataBuilder(AttentionMetadataBuilder[HybridSparseMetadata]):
    """Wraps vLLM's own CPU tensors, and adds the slots of requests that have state.

    Without a device, only the decode mask is copied, unless requests bring drafts.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER
    _runtime: HostRuntime | None = None
    _shares = False  # whether a device shares the decode rows
    _blocks: BlockMirror | None = None  # on CUDA: the block tables in host memory
    _requests: RequestSlots | None = None  # if the policy keeps state per request
    _needs_state = False  # whether rows whose request's state is for other tokens attend to everything (HGCA)
    _drafts = 0  # the most that a request that decodes may bring

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._runtime = runtime = host_runtime(settings_of(vllm_config))
        self._blocks = runtime.blocks if runtime.settings.device == "cuda" else None
        self._block_tokens = vllm_config.cache_config.block_size
        self._requests = runtime.requests if runtime.keeps_request_state else None
        self._shares = runtime.settings.device != "none"
        self._needs_state = runtime.settings.salience is not None
        speculation = vllm_config.speculative_config
        self._drafts = 0 if speculation is None else speculation.num_speculative_tokens

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002  (pages are shared through the block table)
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002
    ) -> HybridSparseMetadata:
        """Build the step's batch.

        A request decodes, and so attends sparsely, once its whole prompt is cached. Before that it attends exactly.
        """
        meta = common_attn_metadata
        if meta.causal is not True:
            raise ConfigError("causal=False: non-causal attention is not supported (attention backend hybrid_sparse)")
        if self._blocks is not None:
            return HybridSparseMetadata(self._device_batch(meta, self._blocks))
        requests = meta.num_reqs
        prefilling = meta.is_prefilling
        # If vLLM does not say, every row attends exactly.
        decoding = torch.zeros(requests, dtype=torch.bool) if prefilling is None else ~prefilling[:requests]
        starts, lengths = meta.query_start_loc_cpu[: requests + 1], meta.seq_lens[:requests]
        pages = meta.block_table_tensor[:requests], meta.slot_mapping
        slots = self._requests.of_batch(requests) if self._requests is not None else None
        if self._drafts:  # with drafts, no policy keeps state per request and no device shares
            return HybridSparseMetadata(_draft_rows(starts, lengths, *pages, decoding, self._drafts))
        if not self._shares:
            return HybridSparseMetadata(NativeBatch.from_tensors(starts, lengths, *pages, decoding, slots))
        if self._needs_state:
            decoding &= self._follows(slots, lengths, starts)
        tiered = TieredBatch.from_tensors(starts, lengths, *pages, decoding, slots, divide=self._divide())
        return HybridSparseMetadata(tiered)

    def _divide(self) -> Divide | None:
        """What divides the decode rows, if there is a device. The worker makes the device tier after the builder."""
        tier = None if self._runtime is None else self._runtime.device_tier
        return None if tier is None else tier.divide

    def _device_batch(self, meta: CommonAttentionMetadata, blocks: BlockMirror) -> DeviceBatch | None:
        """The batch, from vLLM's tensors in host memory and the mirrored block tables; None in a made-up step."""
        tables = blocks.tables(meta.req_idx)
        if tables is None:
            return None
        requests = len(tables)  # `num_reqs` counts padding too
        assert meta.seq_lens_cpu_upper_bound is not None  # exact, since nothing is speculated
        assert meta.is_prefilling is not None
        starts, lengths = meta.query_start_loc_cpu[: requests + 1], meta.seq_lens_cpu_upper_bound[:requests]
        decoding = ~torch.as_tensor(meta.is_prefilling)[:requests]
        slots = None
        if self._requests is not None:
            names = blocks.names(meta.req_idx)
            assert names is not None  # since there are tables
            slots = self._requests.of(names)
        if self._needs_state:
            decoding &= self._follows(slots, lengths, starts)
        return DeviceBatch.from_tensors(
            starts, lengths, decoding, tables, self._block_tokens, slots, divide=self._divide()
        )

    def _follows(self, slots: torch.Tensor | None, lengths: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Whether each request's state is for the tokens before the step's. States advance to the step's last token."""
        assert self._requests is not None
        assert slots is not None
        return self._requests.advance(slots, lengths, starts.diff())


def _draft_rows(
    starts: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    slot_mapping: torch.Tensor,
    decoding: torch.Tensor,
    drafts: int,
) -> NativeBatch:
    """Make a batch in which every token of a request that decodes is a row of its own.

    A request's last token and its drafts attend as they would one after another: all keys of a step are stored before
    any row attends, and each row sees the keys up to its own and chooses for itself. If a request brings more tokens
    than that, they are no drafts but what a preemption took, computed again in chunks as a prompt is.

    drafts   the most that a request may bring; the other arguments are those of `NativeBatch.from_tensors`
    """
    tokens = starts.diff()
    decoding = decoding & (tokens <= 1 + drafts)
    rows = torch.where(decoding, tokens, 1)
    if int(rows.sum()) == len(rows):
        return NativeBatch.from_tensors(starts, lengths, tables, slot_mapping, decoding)
    request = torch.repeat_interleave(rows)  # the request of each row
    left = rows.cumsum(0)[request] - torch.arange(1, len(request) + 1)  # rows of the same request after it
    ends = starts[1:][request] - left
    return NativeBatch.from_tensors(
        torch.cat([starts[:1], ends.to(starts.dtype)]),
        lengths[request] - left.to(lengths.dtype),
        tables[request],
        slot_mapping,
        decoding[request],
    )
