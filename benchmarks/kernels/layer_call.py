"""Time that a layer of ours spends in Python and dispatch: one decode row over a few tokens, so arithmetic is little.

    python -m benchmarks.kernels.layer_call [--seconds 2] [--policy progressive] [--threads 0]

The layer is vLLM's own, of Llama-3.1-8B's heads in BF16, with our backend, and is timed at three depths in turns:

    layer    vLLM's `Attention.forward` and custom op, which call the next
    impl     `HybridSparseImpl.forward`
    native   `NativeAttention.forward`, the call into the core

Exits with 1 if the median of `impl` is above the bar. What the call gives is checked against torch first.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import write_config
from benchmarks.report import save, spread
from tests.tolerances import assert_close
from vllm_hybrid_sparse.settings import POLICIES
from vllm_hybrid_sparse.values import PAGE_TOKENS

BAR_US = 60.0
Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128  # of `write_config`
TOKENS = PAGE_TOKENS // 2  # the page is never full, so no call makes a summary
_NAME = "model.layers.0.self_attn.attn"
_CALLS_IN_TURN = 50


class DecodingLayer:
    """A layer in whose step the only request has `TOKENS` tokens, decodes the last one and stores it."""

    def __init__(self, vllm_config: Any) -> None:
        """The configuration is current, with our backend chosen."""
        from vllm.model_executor.layers.attention import Attention  # noqa: PLC0415  (seconds to import)

        from vllm_hybrid_sparse.glue.metadata import HybridSparseMetadata  # noqa: PLC0415
        from vllm_hybrid_sparse.kernels.paged_attention.native_batch import NativeBatch  # noqa: PLC0415

        self.attention: Any = Attention(
            Q_HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, cache_config=vllm_config.cache_config, prefix=_NAME
        )
        self.impl = self.attention.impl
        self.impl.lay_out(PAGE_TOKENS)
        block_bytes = KV_HEADS * (self.impl.attention.layout.page_bytes + self.impl.attention.layout.summary_bytes)
        self.cache = torch.zeros(4, block_bytes, dtype=torch.uint8)
        self.attention.kv_cache = self.cache
        self.query = torch.randn(1, Q_HEADS, HEAD_DIM).bfloat16()
        self.key, self.value = torch.randn(2, TOKENS, KV_HEADS, HEAD_DIM).bfloat16()
        self.output = torch.empty_like(self.query)
        prompt = NativeBatch.from_tensors(**_step(0, TOKENS - 1, decode=False))
        self.batch = NativeBatch.from_tensors(**_step(TOKENS - 1, TOKENS, decode=True))
        self.metadata = HybridSparseMetadata(self.batch)
        queries = self.query.expand(TOKENS - 1, -1, -1).contiguous()
        self._forward(queries, self.key[:-1], self.value[:-1], prompt, torch.empty_like(queries))

    def _forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Any, output: Tensor) -> None:
        impl = self.impl
        impl.attention.forward(query, key, value, self.cache, batch, impl._selection, None, output, None, None, None)

    def call_layer(self) -> Tensor:
        """As a model does: [1, q_heads * head_dim]."""
        rows = (self.query.flatten(1), self.key[-1:].flatten(1), self.value[-1:].flatten(1))
        answer: Tensor = self.attention(*rows)
        return answer

    def call_impl(self) -> Tensor:
        """As vLLM's layer does."""
        rows = (self.query, self.key[-1:], self.value[-1:])
        answer: Tensor = self.impl.forward(self.attention, *rows, self.cache, self.metadata, self.output)
        return answer

    def call_native(self) -> Tensor:
        """As `HybridSparseImpl` does without a device."""
        self._forward(self.query, self.key[-1:], self.value[-1:], self.batch, self.output)
        return self.output

    def check(self) -> None:
        """AssertionError if a depth does not give full attention."""
        keys, values = (rows.float().transpose(0, 1).repeat_interleave(4, dim=0) for rows in (self.key, self.value))
        expected = torch.nn.functional.scaled_dot_product_attention(
            self.query.float().transpose(0, 1), keys, values, scale=HEAD_DIM**-0.5
        )
        for call in (self.call_layer, self.call_impl, self.call_native):
            self.output.fill_(float("nan"))
            assert_close(call().view(1, Q_HEADS, HEAD_DIM), expected.transpose(0, 1).bfloat16())


def _step(begin: int, end: int, *, decode: bool) -> dict[str, Tensor]:
    """The tensors of a step in which the only request has `end` tokens, those from `begin` on new."""
    return {
        "query_start_loc": torch.tensor([0, end - begin], dtype=torch.int32),
        "seq_lens": torch.tensor([end], dtype=torch.int32),
        "block_table": torch.tensor([[1]], dtype=torch.int32),
        "slot_mapping": torch.arange(PAGE_TOKENS + begin, PAGE_TOKENS + end),
        "decode_mask": torch.tensor([decode]),
    }


@contextmanager
def decoding_layer(settings: dict[str, Any], folder: Path) -> Iterator[DecodingLayer]:
    """The layer within vLLM's contexts, on a CPU.

    settings   of our backend
    folder     where the configuration of a model is written
    """
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.forward_context import set_forward_context  # noqa: PLC0415
    from vllm.plugins import load_general_plugins  # noqa: PLC0415

    load_general_plugins()
    write_config(folder, layers=1, hidden=256)
    vllm_config = EngineArgs(
        model=str(folder),
        dtype="bfloat16",
        block_size=PAGE_TOKENS,
        max_model_len=1024,
        skip_tokenizer_init=True,
        attention_backend="hybrid_sparse",
        additional_config={"hybrid_sparse": settings},
    ).create_engine_config()
    with set_current_vllm_config(vllm_config):
        layer = DecodingLayer(vllm_config)
        with set_forward_context({_NAME: layer.metadata}, vllm_config):
            yield layer


def time_calls(calls: dict[str, Callable[[], object]], least_s: float) -> dict[str, dict[str, float]]:
    """The spread of each kind's calls, in µs. Kinds take turns, some calls each; the first turn warms up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    begun_s = time.perf_counter()
    while time.perf_counter() - begun_s < least_s or min(map(len, times.values())) < 2 * _CALLS_IN_TURN:
        for name, call in calls.items():
            for _ in range(_CALLS_IN_TURN):
                start_s = time.perf_counter()
                call()
                times[name].append((time.perf_counter() - start_s) * 1e6)
    return {name: spread(of_kind[_CALLS_IN_TURN:]) for name, of_kind in times.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, time, print, keep the result; return 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", default=2.0, type=float, help="least time of measuring (%(default)s)")
    parser.add_argument("--policy", default="progressive", choices=[name for name in POLICIES if name != "fluxion"])
    parser.add_argument("--threads", default=0, type=int, help="of the native kernel; 0: as served (%(default)s)")
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="layer-call-") as name,
        torch.inference_mode(),
        decoding_layer({"policy": options.policy, "num_threads": options.threads}, Path(name)) as layer,
    ):
        layer.check()
        times = time_calls(
            {"layer": layer.call_layer, "impl": layer.call_impl, "native": layer.call_native}, options.seconds
        )
        isa = layer.impl.attention.isa
    for kind, of_kind in times.items():
        print(f"{kind:<8}{of_kind['p50']:6.1f} µs ({of_kind['p20']:.1f}–{of_kind['p80']:.1f})")
    passed = times["impl"]["p50"] <= BAR_US
    print(f"bar: impl at most {BAR_US:g} µs: {'pass' if passed else 'MISSED'}")
    content = {"policy": options.policy, "threads": options.threads, "isa": isa, "bar_us": BAR_US}
    content |= {"passed": passed, "time_us": times}
    print(f"kept in {save('layer_call', content)}", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
