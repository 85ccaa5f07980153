"""The device tier of one worker process: its pool, the threads that serve it, and their statistics."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_hybrid_sparse.config import HybridSparseConfig
from vllm_hybrid_sparse.errors import ConfigError, KernelError
from vllm_hybrid_sparse.kernels.fallbacks import count_fallback
from vllm_hybrid_sparse.kernels.paged_attention.native import DTYPE_NAMES, NativeAttention
from vllm_hybrid_sparse.memory.block_frames import FrameShape
from vllm_hybrid_sparse.memory.device_pool import DevicePool, PoolShape, free_device_bytes
from vllm_hybrid_sparse.memory.host_pages import HostPages
from vllm_hybrid_sparse.memory.layout import BlockLayout
from vllm_hybrid_sparse.memory.page_keys import block_page_numbers
from vllm_hybrid_sparse.memory.pinned import available_bytes
from vllm_hybrid_sparse.memory.queues import device_thread, open_queue
from vllm_hybrid_sparse.memory.transfers import Loader
from vllm_hybrid_sparse.metrics import DecodeStats, TierStats
from vllm_hybrid_sparse.runtime import plain_ranking
from vllm_hybrid_sparse.runtime.device import Device
from vllm_hybrid_sparse.runtime.device_side import DeviceSide
from vllm_hybrid_sparse.runtime.emulated import EmulatedDevice
from vllm_hybrid_sparse.runtime.ranking import DeviceRanking, PageCodes
from vllm_hybrid_sparse.runtime.ranking_kernels import RankingKernels
from vllm_hybrid_sparse.runtime.residency import Residency, StepResidency
from vllm_hybrid_sparse.values import PAGE_TOKENS

logger = logging.getLogger(__name__)

THREAD_NAME = "hybrid-sparse-launcher"

_MOST_DIRECTORY_SHARE = 0.5
"""The most that codes and entries of all pages may take of the device memory that profiling leaves. Calculated: with
key codes of two bits, 7.8 % of the KV bytes, the host store is then at most six times the pool."""


class DeviceTier:
    """One pool for all layers that store keys, in the order of `kv_caches`. Made once the KV memory is there.

    The thread that runs the steps calls everything but `take_stats` and `close`. Raises ConfigError if the pool cannot
    hold what one group needs.
    """

    def __init__(
        self,
        settings: HybridSparseConfig,
        kv_caches: Sequence[Tensor],
        attention: NativeAttention,
        *,
        device: torch.device | None = None,
        device_bytes: int = 0,
    ) -> None:
        """Raises ConfigError.

        kv_caches      one a layer, as `NativeAttention.forward` takes them; one that two layers share counts once
        attention      the kernel of all these layers
        device         CUDA only: where the slots lie and the kernels run; in CPU memory they are interpreted
        device_bytes   CUDA only: memory for the slots, if the settings do not give their number
        """
        self.settings = settings
        self._layer_of = {address: layer for layer, address in enumerate(_addresses(kv_caches))}
        stored_pages = (
            sum(len(kv_cache) for kv_cache in kv_caches) * attention.num_kv_heads * attention.layout.pages_per_block
        )
        # More slots than pages would stay empty. If every block has a frame, the other slots serve single pages.
        useful_pages = math.ceil(stored_pages / (settings.device_resident_share or 1.0))
        self._layout = BlockLayout(
            dtype=DTYPE_NAMES[attention.dtype],
            head_dim=attention.head_dim,
            block_tokens=attention.layout.pages_per_block * PAGE_TOKENS,
            summary=attention.summary,
            code_bits=settings.page_code_bits,
        )
        self._ranks = self._may_rank(device, stored_pages, device_bytes)
        if self._ranks:
            device_bytes -= self._directory_bytes(stored_pages)
        shape = PoolShape(
            capacity_pages=settings.device_pool_pages or min(device_bytes // attention.layout.page_bytes, useful_pages),
            layers=len(self._layer_of),
            head_dim=attention.head_dim,
            dtype=attention.dtype,
            eviction=settings.device_eviction or "",
            unified=settings.device_pool == "unified",
        )
        least = check_pool_pages(settings, shape.capacity_pages, shape.layers)
        if settings.device_pool_pages is not None:
            directory_bytes = self._directory_bytes(stored_pages) if self._ranks and device is not None else 0
            _check_pool_memory(shape.capacity_pages, attention.layout.page_bytes, device, directory_bytes)
        self.pool, self.device = open_device(shape, device)
        self.loader = Loader(self.pool)
        self.side = DeviceSide(self.loader, self.device)
        self.launcher = device_thread(THREAD_NAME, self.pool.key.device)
        self.kv_heads = attention.num_kv_heads
        self._page_bytes = attention.layout.page_bytes
        self._sources: dict[int, HostPages] = {}
        by_layer = {self.layer_of(kv_cache): self.source(kv_cache) for kv_cache in kv_caches}
        sources = [by_layer[layer] for layer in range(shape.layers)]
        self.ranking = open_ranking(settings, self.pool, sources, attention.head_dim) if self._ranks else None
        self.residency = self._residency(sources, least)
        self._stats = TierStats()
        self._decode_stats = DecodeStats()
        self._evictions = 0
        self._entered_blocks = 0
        self.failures = 0  # loads that failed since the start

    def _may_rank(self, device: torch.device | None, stored_pages: int, device_bytes: int) -> bool:
        """Whether the device is to choose pages by itself, and has the memory for that."""
        if self.settings.device_ranking != "device":
            return False
        if device is None:  # in host memory, which is enough
            return True
        needed = self._directory_bytes(stored_pages)
        if self.settings.device_pool_pages is None and needed > _MOST_DIRECTORY_SHARE * device_bytes:
            count_fallback("device_ranking")
            logger.warning(
                "hybrid_sparse.device_ranking='device': codes and places of all pages of the host store take %.1f GiB "
                "of the device, more than %d %% of the %.1f GiB that there are; the host ranks pages",
                needed / 2**30,
                100 * _MOST_DIRECTORY_SHARE,
                device_bytes / 2**30,
            )
            return False
        return True

    def _directory_bytes(self, stored_pages: int) -> int:
        """Device memory that ranking takes in addition to the slots: codes and a directory entry for each page."""
        code_bytes = self._layout.summary_bytes if self.settings.selection.ranked else 0
        return stored_pages * (code_bytes + torch.int32.itemsize)

    def _residency(self, sources: Sequence[HostPages], least: int) -> Residency | None:
        """What keeps whole blocks on the device; None if the settings ask for none, or not one block fits."""
        share = self.settings.device_resident_share
        if not share:
            return None
        shape = FrameShape(
            layers=len(self._layer_of), kv_heads=self.kv_heads, pages_per_block=self._layout.pages_per_block
        )
        capacity = self.pool.shape.capacity_pages
        frames = min(int(capacity * share), capacity - least) // shape.slots
        if frames < 1:
            count_fallback("device_resident_share")
            logger.warning(
                "hybrid_sparse.device_resident_share=%s: a block of all layers takes %d of the %d slots, so no request "
                "is resident",
                share,
                shape.slots,
                capacity,
            )
            return None
        slots = None if self.ranking is None else self.ranking.directory
        return Residency(self.loader, shape, sources, frames, slots)

    @property
    def layer_pages(self) -> int:
        """One layer's share of the slots, whether layers share them or each has a part, and whatever frames take."""
        return self.pool.shape.capacity_pages // self.pool.shape.layers

    @property
    def groups_at_once(self) -> int:
        """Groups of one layer that fit the pool together."""
        return self.pool.layer_slots // group_pages(self.settings)

    def layer_of(self, kv_cache: Tensor) -> int:
        """The number of the layer that stores its keys in `kv_cache`. KernelError if it is none of the tier's."""
        layer = self._layer_of.get(kv_cache.data_ptr())
        if layer is None:
            raise KernelError("kv_cache: is none of those that the device tier was made for")
        return layer

    def encode_blocks(self, kv_cache: Tensor, blocks: Sequence[int]) -> None:
        """If the device ranks pages, make its summaries of a layer's blocks that something else wrote."""
        if self.ranking is not None:
            self.ranking.encode_blocks(self.layer_of(kv_cache), blocks)

    def source(self, kv_cache: Tensor) -> HostPages:
        """The pages of a layer's host store."""
        layer = self.layer_of(kv_cache)
        if layer not in self._sources:
            self._sources[layer] = HostPages(kv_cache, self._layout, self.kv_heads)
        return self._sources[layer]

    def forget_blocks(self, blocks: Sequence[int]) -> None:
        """Drop all pages of blocks, in every layer, that something other than a step has written or is about to."""
        of_block = self._layout.pages_per_block
        if not blocks:
            return
        if self.ranking is not None:
            self.ranking.forget_blocks(blocks)
        else:
            layers = range(len(self._layer_of))
            pages = [block_page_numbers(layer, self.kv_heads, blocks, of_block) for layer in layers]
            self.loader.forget(np.stack(pages)).result()
        if self.residency is not None:
            self.residency.forget(blocks)

    def divide(
        self, tokens: Sequence[int], tables: Sequence[Tensor], seq_lens: Sequence[int], written_pages: Sequence[int]
    ) -> StepResidency | None:
        """Say which decode rows of a step the device computes by itself; None if it never does. Call it once a step.

        The arguments are those of `Residency.divide`. `written_pages` are pages of the host store that something other
        than decode rows writes in this step.
        """
        divided = self._divide(tokens, [table.numpy() for table in tables], seq_lens, written_pages)
        if divided is not None:
            self._count_divided(divided)
        return divided

    def _divide(
        self,
        tokens: Sequence[int],
        tables: Sequence[NDArray[np.int32]],
        seq_lens: Sequence[int],
        written_pages: Sequence[int],
    ) -> StepResidency | None:
        if self.ranking is not None:
            self.ranking.begin_step(tables, seq_lens, written_pages)
        divided = None
        if self.residency is not None:
            self.residency.forget(sorted({page // self._layout.pages_per_block for page in written_pages}))
            divided = self.residency.divide(tokens, tables, seq_lens)
            for error in self.residency.failures:
                self.report_failure(error)
            self.residency.failures.clear()
        if self.ranking is None:
            return divided
        if divided is None:
            divided = StepResidency(np.zeros(len(tokens), dtype=np.bool_), None, None)
        rest = np.flatnonzero(~divided.resident).tolist()
        block_tokens = self._layout.pages_per_block * PAGE_TOKENS
        ranked = self.ranking.rows(
            [tokens[row] for row in rest],
            [tables[row][: -(-seq_lens[row] // block_tokens)] for row in rest],
            [seq_lens[row] for row in rest],
        )
        return replace(divided, ranked=ranked)

    def _count_divided(self, divided: StepResidency) -> None:
        """Count rows that the device computes by itself. What ranked rows read is known later."""
        every = self.kv_heads * len(self._layer_of)  # all layers read alike
        of_rows = [] if divided.rows is None else divided.rows.seq_lens
        groups, pages = len(of_rows) * every, sum(-(-seq_len // PAGE_TOKENS) for seq_len in of_rows) * every
        read_bytes = pages * self._page_bytes
        self.count(
            TierStats(
                groups=groups,
                resident_groups=groups,
                pages_wanted=pages,
                pages_hit=pages,
            ),
            DecodeStats(
                selections=groups,
                pages_total=pages,
                pages_read=pages,
                total_bytes=read_bytes,
                read_bytes=read_bytes,
            ),
        )
        if divided.ranked:
            self._count_ranked([seq_len for part in divided.ranked for seq_len in part.seq_lens], every)

    def _count_ranked(self, seq_lens: Sequence[int], every: int) -> None:
        groups = len(seq_lens) * every
        pages = sum(-(-seq_len // PAGE_TOKENS) for seq_len in seq_lens) * every
        summaries = 0
        if self.settings.selection.ranked:
            ranges = [self.settings.retained.candidate_range(seq_len) for seq_len in seq_lens]
            summaries = sum(end - first for first, end in ranges) * every * self._layout.summary_bytes
        self.count(
            TierStats(groups=groups, ranked_groups=groups),
            DecodeStats(
                selections=groups,
                pages_total=pages,
                total_bytes=pages * self._page_bytes,
                read_bytes=summaries,
                summary_bytes=summaries,
            ),
        )

    def _count_reading(self) -> None:
        """Count what ranked rows have read, as far as it is known."""
        if self.ranking is None:
            return
        numbers = self.ranking.take_numbers()
        pages, hits, looked = int(numbers["pages"]), int(numbers["hits"]), int(numbers["looked"])
        stops, kept, looks = int(numbers["stops"]), numbers["kept"], int(numbers["looks"])
        self.count(
            TierStats(
                pages_wanted=pages,
                pages_hit=hits,
                pages_fetched=pages - hits,
                microbatches=looks,
                early_stops=stops,
                looked_groups=looked,
                kept_mass=kept,
            ),
            DecodeStats(
                pages_read=pages,
                read_bytes=pages * self._page_bytes,
                early_stops=stops,
                judged=looked,
                kept_mass=kept,
                microbatches=looks,
            ),
        )

    def count(self, tiers: TierStats, decode: DecodeStats) -> None:
        """Add the counts of a layer's step."""
        self._stats += tiers
        self._decode_stats += decode

    def report_failure(self, error: Exception) -> None:
        """Log the first failed load, and count all. The host attends to the pages that they were for."""
        if not self.failures:
            logger.warning("hybrid_sparse: %s; the host attends to these pages, and later failures are counted", error)
        self.failures += 1

    def take_stats(self) -> TierStats:
        """What device and host did since the last call."""
        self._count_reading()
        evicted = self.pool.evictions - self._evictions
        self._evictions += evicted
        entered = 0 if self.residency is None else self.residency.entered_blocks - self._entered_blocks
        self._entered_blocks += entered
        stats, self._stats = self._stats + TierStats(pages_evicted=evicted, blocks_entered=entered), TierStats()
        return stats

    def take_decode_stats(self) -> DecodeStats:
        """How much of the cache was read since the last call."""
        self._count_reading()
        stats, self._decode_stats = self._decode_stats, DecodeStats()
        return stats

    def close(self) -> None:
        """End all threads, after they finish what they were asked for. A second call does nothing."""
        self.launcher.shutdown(wait=True)
        self.device.close()
        self.loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_device(shape: PoolShape, device: torch.device | None) -> tuple[DevicePool, Device]:
    """A pool and the device that attends to its slots: emulated, or CUDA with the slots on `device`."""
    if device is None:
        pool = DevicePool(shape)
        return pool, EmulatedDevice(pool)
    from vllm_hybrid_sparse.memory.cuda_pool import CudaPool  # noqa: PLC0415  (Triton, which only this device needs)
    from vllm_hybrid_sparse.runtime.cuda import CudaDevice  # noqa: PLC0415

    on_cuda = CudaPool(shape, open_queue(device))
    return on_cuda, CudaDevice(on_cuda)


def open_ranking(
    settings: HybridSparseConfig, pool: DevicePool, sources: Sequence[HostPages], head_dim: int
) -> DeviceRanking:
    """The ranking of decode rows on the device that the pool's slots lie on."""
    kernels: RankingKernels = plain_ranking
    if settings.device == "cuda":
        from vllm_hybrid_sparse.runtime import gpu_ranking  # noqa: PLC0415  (Triton, which only this device needs)

        kernels = gpu_ranking
    codes = None
    if settings.selection.ranked:
        summary_bytes = sources[0].summary_bytes
        shape = (len(sources), sources[0].num_kv_heads, sources[0].num_pages, summary_bytes)
        codes = PageCodes(
            torch.zeros(shape, dtype=torch.uint8, device=pool.key.device), head_dim, settings.page_code_bits
        )
    return DeviceRanking(pool, sources, settings.selection, settings.retained, codes, kernels)


def check_pool_pages(settings: HybridSparseConfig, pages: int, layers: int) -> int:
    """The fewest slots that a pool for this many layers may have. ConfigError if it has fewer."""
    unified = settings.device_pool == "unified"
    least = group_pages(settings) * (1 if unified else layers)
    if pages < least:
        of_layers = "" if unified else f", for each of {layers} layers"
        raise ConfigError(
            f"hybrid_sparse.device_pool_pages={pages}: must be at least {least}, two microbatches of one "
            f"KV head{of_layers}"
        )
    return least


def _check_pool_memory(pages: int, page_bytes: int, device: torch.device | None, directory_bytes: int) -> None:
    """ConfigError if the slots that the settings ask for take more memory than there is.

    device            None, or in CPU memory: emulated
    directory_bytes   of the memory, what ranking takes in addition
    """
    if device is not None and device.type == "cuda":
        available, kind = free_device_bytes(device), "GPU"
    else:
        available, kind = available_bytes(), "host"
    if pages * page_bytes + directory_bytes > available:
        beside = f" beside {directory_bytes / 2**30:.1f} GiB for ranking" if directory_bytes else ""
        raise ConfigError(
            f"hybrid_sparse.device_pool_pages={pages}: must be at most "
            f"{max(0, available - directory_bytes) // page_bytes}, pages of {page_bytes} bytes in the "
            f"{available / 2**30:.1f} GiB of {kind} memory that are available{beside}"
        )


def group_pages(settings: HybridSparseConfig) -> int:
    """Slots that one group needs while it is read: for the microbatch being attended and the one being loaded."""
    return settings.selection.pages_in_flight


def _addresses(kv_caches: Sequence[Tensor]) -> list[int]:
    return list(dict.fromkeys(kv_cache.data_ptr() for kv_cache in kv_caches))
