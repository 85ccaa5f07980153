"""Many engines in one process, one after another: seconds each where a server takes half a minute.

Run as a program by `engine_jobs.run_jobs`, with a JSON list of jobs on standard input; prints one line `RESULT {json}`
a job. Engine and worker live in this process.
"""

import gc
import json
import sys
from typing import Any

from vllm import LLM, SamplingParams

from tests.system.engine_jobs import MARK


def causes(error: BaseException) -> str:
    """Return the text of an error and of what caused it, outermost first."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__cause__ or cause.__context__
    return "\n".join(texts)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run one job and return its result, the error's text where the engine does not start."""
    try:
        engine = LLM(**job["engine_args"])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result: the test judges its text
        return {"name": job["name"], "error": causes(error)}
    sampling = SamplingParams(
        temperature=0, max_tokens=job.get("max_tokens", 1), ignore_eos=True, logprobs=2 if job.get("margins") else None
    )
    prompts = [{"prompt_token_ids": token_ids} for token_ids in job.get("prompts", [])]
    answers = []
    for request in engine.generate(prompts, sampling, use_tqdm=False) if prompts else []:
        output = request.outputs[0]
        ranked = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in output.logprobs or []]
        answers.append({"token_ids": list(output.token_ids), "margins": [best[0] - best[1] for best in ranked]})
    return {"name": job["name"], "answers": answers}


def main() -> None:
    """Run the jobs of standard input."""
    for job in json.load(sys.stdin):
        print(MARK + json.dumps(run(job)), flush=True)
        gc.collect()  # the KV cache of the last engine


if __name__ == "__main__":
    main()
