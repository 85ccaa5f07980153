"""Many engines in one process, one after another: each takes seconds, while a server takes half a minute.

Run as a program by `engine_jobs.run_jobs`, with a JSON list of jobs on standard input; prints one line `RESULT {json}`
a job. Engine and worker live in this process.
"""

import gc
import json
import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.metrics.reader import Counter

from tests.system.engine_jobs import MARK


def causes(error: BaseException) -> str:
    """Return the text of an error and of what caused it, outermost first."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return "\n".join(texts)


def full_blocks(worker: Any) -> dict[str, int]:
    """Count the first layer's blocks with keys in their last page, and those of them with summaries of other keys."""
    cache = worker.model_runner.kv_caches[0]
    impl = next(iter(worker.model_runner.compilation_config.static_forward_context.values())).impl
    layout = impl.attention.layout
    stored = cache.view(torch.uint8).flatten(1)
    last_page = stored[:, (layout.pages_per_block - 1) * layout.page_bytes : layout.pages_per_block * layout.page_bytes]
    full = last_page.any(dim=1).nonzero().flatten().to(torch.int32)
    anew = cache.clone()
    impl.attention.summarize(anew, full)
    stale = (anew.view(torch.uint8).flatten(1) != stored).any(dim=1)
    return {"full": len(full), "stale": int(stale.sum())}


def entered_blocks(worker: Any) -> int:
    """Blocks that have entered frames of the device pool since the start."""
    entered: int = worker._runtime.device_tier.residency.entered_blocks
    return entered


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job and return its result, or the error's text if the engine does not start."""
    try:
        engine = LLM(**job["engine_args"])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result: the test judges its text
        return {"name": job["name"], "error": causes(error)}
    sampling = SamplingParams(
        temperature=0, max_tokens=job.get("max_tokens", 1), ignore_eos=True, logprobs=2 if job.get("margins") else None
    )
    prompts = [{"prompt_token_ids": token_ids} for token_ids in job.get("prompts", [])]
    adapter = LoRARequest("adapter", 1, job["adapter"]) if "adapter" in job else None
    chosen = [adapter if place % 2 else None for place in range(len(prompts))] if adapter else None
    answers = []
    for request in engine.generate(prompts, sampling, use_tqdm=False, lora_request=chosen) if prompts else []:
        output = request.outputs[0]
        ranked = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in output.logprobs or []]
        answers.append({"token_ids": list(output.token_ids), "margins": [best[0] - best[1] for best in ranked]})
    result = {"name": job["name"], "answers": answers}
    if job.get("blocks"):
        result["blocks"] = engine.collective_rpc(full_blocks)[0]
    if job.get("entered"):
        result["entered"] = engine.collective_rpc(entered_blocks)[0]
    if job.get("counters"):
        values = {metric.name: metric.value for metric in engine.get_metrics() if isinstance(metric, Counter)}
        result["counters"] = [values[name] for name in job["counters"]]
    return result


def freeze_imports() -> None:
    """Exclude what was imported from every later collection: half a million objects, walked seven times an engine.

    vLLM itself freezes the heap, and thaws all of it when an engine ends. So here both are made to do nothing.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def main() -> None:
    """Run the jobs of standard input."""
    freeze_imports()
    for job in json.load(sys.stdin):
        print(MARK + json.dumps(run(job)), flush=True)
        gc.collect()  # frees the KV cache of the last engine


if __name__ == "__main__":
    main()
