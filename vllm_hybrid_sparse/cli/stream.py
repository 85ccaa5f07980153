"""One streamed completion and when its tokens came."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from openai import OpenAI


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, and the seconds between the request and each piece of it."""

    text: str
    arrivals_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """Time to first token; NaN if none came."""
        return self.arrivals_s[0] if self.arrivals_s else float("nan")

    @property
    def tpot_s(self) -> float:
        """Time per output token, the median gap between two; NaN if fewer than two came."""
        gaps = [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]
        return statistics.median(gaps) if gaps else float("nan")


def complete(
    client: OpenAI,
    model: str,
    prompt: str,
    max_tokens: int,
    on_text: Callable[[str], None],
    stop: str | None = None,
) -> Reply:
    """Complete `prompt` greedily; `on_text` gets each piece as it comes.

    stop   text that ends the reply, or None: go on to `max_tokens` whatever the model says
    """
    begun = time.perf_counter()
    arrivals_s: list[float] = []
    pieces: list[str] = []
    with client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
        stop=stop,
        extra_body={"ignore_eos": stop is None},
    ) as stream:
        for chunk in stream:
            text = chunk.choices[0].text if chunk.choices else ""
            if not text:
                continue
            arrivals_s.append(time.perf_counter() - begun)
            pieces.append(text)
            on_text(text)
    return Reply("".join(pieces), tuple(arrivals_s))
