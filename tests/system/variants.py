"""What the exactness tests run: how our servers and the engine of stock vLLM are started."""

import json
import os
from dataclasses import dataclass

START_TIMEOUT_S = 600  # compiling, on a busy machine
MAX_MODEL_TOKENS = 2048
CHUNK_TOKENS = 256
SMOLLM2_GROUPS = 30 * 3  # layers and KV heads
_KV_BYTES_PER_TOKEN = 2 * SMOLLM2_GROUPS * 64 * 4  # SmolLM2-135M in fp32: K and V, heads of 64
_LEAST_POOL_PAGES = {"dense": 16, "progressive": 32}  # two microbatches of one group: a smaller pool is refused
_SUMMARY_SHARE = {"dense": 0.0, "progressive": 1 / 32}  # of the KV bytes; for key codes a bit more, 320/8192
CAPACITY_TOKENS = 2400  # little more than one longest request, so that concurrent requests preempt each other


def stock_args(dtype: str, max_model_tokens: int, kv_cache_bytes: int) -> list[str]:
    """Arguments that every server of the tests shares."""
    return [
        f"--dtype={dtype}",
        f"--max-model-len={max_model_tokens}",
        f"--kv-cache-memory-bytes={kv_cache_bytes}",
    ]  # fmt: skip


def our_args(**settings: object) -> list[str]:
    """Arguments that choose our backend with `settings`."""
    return ["--attention-backend=hybrid_sparse", f"--additional-config={json.dumps({'hybrid_sparse': settings})}"]


def kv_cache_bytes(policy: str, tokens: int) -> int:
    """Bytes of a KV cache in fp32 for `tokens` tokens of SmolLM2 under `policy`."""
    return int(tokens * _KV_BYTES_PER_TOKEN * (1 + _SUMMARY_SHARE[policy]))


def server_env() -> dict[str, str]:
    """Environment of every server: a thread a core, on a machine that may have other work.

    Threads sleep while they wait, and are bound to no core. If they were bound, the main threads of all servers would
    share the first core, and the others would be idle while servers start.
    """
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "passive",
    }


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve SmolLM2 in fp32 with our backend, exact by promise."""

    policy: str  # dense or progressive
    block_tokens: int
    compiled: bool
    device: str = "none"  # or emulated, with the smallest pool: all 90 groups take turns at its slots

    @property
    def name(self) -> str:
        """Name of the test case."""
        name = f"{self.policy}-block{self.block_tokens}-{'compiled' if self.compiled else 'eager'}"
        return name if self.device == "none" else f"{name}-{self.device}"

    @property
    def pool_pages(self) -> int:
        """Slots of the device pool; 0 without a device."""
        return 0 if self.device == "none" else _LEAST_POOL_PAGES[self.policy]

    @property
    def args(self) -> list[str]:
        """Arguments of `vllm serve`: small prefill chunks, and a KV cache that concurrent requests overflow."""
        settings: dict[str, object] = {"threshold": 1.0} if self.policy == "progressive" else {}
        if self.pool_pages:  # however little fits, requests run side by side, so that some are preempted
            settings |= {"device": self.device, "device_pool_pages": self.pool_pages, "admission": "none"}
        return [
            *stock_args("float32", MAX_MODEL_TOKENS, kv_cache_bytes(self.policy, CAPACITY_TOKENS)),
            *our_args(policy=self.policy, **settings),
            f"--block-size={self.block_tokens}",
            f"--max-num-batched-tokens={CHUNK_TOKENS}",
            "--enable-prefix-caching",
            *([] if self.compiled else ["--enforce-eager"]),
        ]


def reference_engine_args() -> dict[str, object]:
    """Stock vLLM, as `vllm.LLM` takes it, with nothing that could blur the comparison.

    One request at a time, whole prompts, no reuse, blocks of its own choice.
    """
    return {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_TOKENS,
        "kv_cache_memory_bytes": 2 * MAX_MODEL_TOKENS * _KV_BYTES_PER_TOKEN,
        "max_num_batched_tokens": MAX_MODEL_TOKENS,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }


# Both policies, compiled and not; blocks of 16 tokens are what `test_families.py` and others serve.
DEFAULT_VARIANTS = (Variant("dense", 32, compiled=False), Variant("progressive", 128, compiled=True))
SLOW_VARIANTS = tuple(
    variant
    for policy in ("dense", "progressive")
    for block_tokens in (16, 32, 128)
    for compiled in (False, True)
    if (variant := Variant(policy, block_tokens, compiled)) not in DEFAULT_VARIANTS
)
EMULATED_VARIANTS = (
    Variant("dense", 16, compiled=False, device="emulated"),
    Variant("progressive", 128, compiled=True, device="emulated"),
)
