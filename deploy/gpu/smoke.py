"""The first thing to run on a GPU machine: does what this project builds on work there?

    python deploy/gpu/smoke.py STAGE      ops | merge | triton_attn | flash_attn | graphs

ops           vLLM's CUDA operators, and a view of pinned host memory from the device
merge         FlashInfer's merge_state against a reference in float32
triton_attn   a tiny model answers with TRITON_ATTN, eagerly
flash_attn    the same with FLASH_ATTN
graphs        the same with FLASH_ATTN and piecewise CUDA graphs

Prints one line a finding. Exits with 0 where all is well, 1 where not, 77 where what the stage needs is not installed.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

NOT_INSTALLED = 77
SPECIALS = ("<s>", "</s>", "<pad>")
TOLERANCE = 2e-2  # bf16 results of unit size against float32


def report(what: str, error: float) -> bool:
    """Print a finding and return whether the error is small enough."""
    fine = error < TOLERANCE
    print(f"{what}: largest error {error:.2g}{'' if fine else ', TOO LARGE'}")
    return fine


def ops() -> bool:
    """Run vLLM's operators that the thinned build must still hold."""
    from vllm import _custom_ops  # noqa: PLC0415  (minutes to import; only the stages that need it)
    from vllm.platforms import current_platform  # noqa: PLC0415

    current_platform.import_kernels()
    rows = torch.randn(64, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    normed = torch.empty_like(rows)
    _custom_ops.rms_norm(normed, rows, weight, 1e-5)
    wide = rows.float()
    wanted = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    fine = report("rms_norm", float(((normed.float() - wanted) / wanted.abs().clamp(min=1)).abs().max()))

    gated = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    product = torch.empty(8, 512, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(product, gated)
    wanted = torch.nn.functional.silu(gated[:, :512].float()) * gated[:, 512:].float()
    fine &= report("silu_and_mul", float(((product.float() - wanted) / wanted.abs().clamp(min=1)).abs().max()))

    host = torch.zeros(4, pin_memory=True)
    view = torch.ops._C.get_cuda_view_from_cpu_tensor(host)
    view += 1
    torch.cuda.synchronize()
    return fine & report("view of pinned memory", float((host - 1).abs().max()))


def merge() -> bool:
    """Merge states with FlashInfer, whose log-sum-exp is of base 2."""
    from flashinfer.cascade import merge_state  # noqa: PLC0415

    out_a, out_b = torch.randn(2, 257, 8, 128, device="cuda", dtype=torch.bfloat16)
    lse_a, lse_b = 3 * torch.randn(2, 257, 8, device="cuda")
    begun = time.perf_counter()
    out, lse = merge_state(out_a, lse_a, out_b, lse_b)
    torch.cuda.synchronize()
    print(f"merge_state: first call after {time.perf_counter() - begun:.2f} s")
    peak = torch.maximum(lse_a, lse_b)
    weight_a, weight_b = torch.exp2(lse_a - peak), torch.exp2(lse_b - peak)
    total = weight_a + weight_b
    wanted = (out_a.float() * weight_a[..., None] + out_b.float() * weight_b[..., None]) / total[..., None]
    fine = report("merge_state, output", float((out.float() - wanted).abs().max()))
    return fine & report("merge_state, log-sum-exp", float((lse - peak - total.log2()).abs().max()))


def write_tiny_model(folder: Path) -> None:
    """Write a random Llama of two layers with a byte tokenizer: all that a start of vLLM needs, offline."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415

    torch.manual_seed(0)
    vocabulary = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for special in SPECIALS:
        vocabulary[special] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIALS, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=vocabulary["<s>"],
        eos_token_id=vocabulary["</s>"],
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def answers(backend: str, *, eager: bool) -> bool:
    """Let a tiny model answer the same prompt four times; the answers must be the same."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has used the GPU, so none may be forked from it
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model(Path(folder))
        begun = time.perf_counter()
        llm = LLM(
            folder,
            dtype="bfloat16",
            max_model_len=2048,
            gpu_memory_utilization=0.3,
            attention_backend=backend,
            enforce_eager=eager,
            enable_flashinfer_autotune=False,  # the bundle's FlashInfer has merge_state alone
        )
        ready = time.perf_counter()
        outputs = llm.generate(["hello world"] * 4, SamplingParams(temperature=0, max_tokens=16))
        ended = time.perf_counter()
    tokens = {tuple(output.outputs[0].token_ids) for output in outputs}
    print(f"{backend}: start {ready - begun:.1f} s, answer {ended - ready:.1f} s, {sorted(tokens)[0][:8]}")
    return len(tokens) == 1


STAGES: dict[str, tuple[str, Callable[[], bool]]] = {
    "ops": ("vllm", ops),
    "merge": ("flashinfer", merge),
    "triton_attn": ("vllm", lambda: answers("TRITON_ATTN", eager=True)),
    "flash_attn": ("vllm", lambda: answers("FLASH_ATTN", eager=True)),
    "graphs": ("vllm", lambda: answers("FLASH_ATTN", eager=False)),
}


def main(names: list[str]) -> int:
    """Run one stage here; several each in a process of its own, so that a failure stops no other."""
    if not names or not set(names) <= set(STAGES):
        print(f"stage={' '.join(names) or 'none'}: must be among {', '.join(STAGES)}", file=sys.stderr)
        return 2
    if len(names) > 1:
        script = [sys.executable, str(Path(__file__).resolve())]
        codes = {subprocess.run([*script, name], check=False).returncode for name in names}
        return 1 if codes - {0, NOT_INSTALLED} else max(codes)  # one that a signal ended has a code below 0
    package, run = STAGES[names[0]]
    if find_spec(package) is None:
        print(f"{package} is not installed")
        return NOT_INSTALLED
    if not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is false", file=sys.stderr)
        return 1
    return 0 if run() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
