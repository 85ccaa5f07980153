"""One request to the server and what came back, whole or broken off on purpose."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.soak.known import margins
from benchmarks.soak.wrong_requests import COMPLETIONS, Wrong
from vllm_hybrid_sparse.load.sse import EventDecoder, StreamError

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that came to its end."""

    status: int
    token_ids: tuple[int, ...] = ()
    margins: tuple[float, ...] = ()  # if log-probabilities were asked for
    text: str = ""  # the beginning of a body that is not an answer


class Talk:
    """Sends requests to one server, each over a connection of its own."""

    def __init__(self, http: aiohttp.ClientSession, root: str, model: str) -> None:
        self.model = model
        self._http = http
        self._root = root

    def greedy(self, prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the body of a request for a greedy answer of exactly `max_tokens` tokens."""
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        } | more

    async def whole(self, body: dict[str, Any]) -> Reply:
        """Return the answer to a request that is not streamed."""
        async with self._post(body) as reply:
            text = await reply.text(errors="replace")
            if reply.status != 200:
                return Reply(reply.status, text=text[:300])
        choice = json.loads(text)["choices"][0]
        steps = (choice.get("logprobs") or {}).get("top_logprobs") or ()
        return Reply(200, tuple(choice["token_ids"]), tuple(margins(steps)))

    async def streamed(self, body: dict[str, Any], hang_up_after: int | None = None) -> Reply:
        """Return the answer to a streamed request; after `hang_up_after` tokens the connection is closed."""
        token_ids: list[int] = []
        decoder, done = EventDecoder(), False
        async with self._post(body | {"stream": True}) as reply:
            if reply.status != 200:
                return Reply(reply.status, text=(await reply.text(errors="replace"))[:300])
            async for piece in reply.content.iter_any():
                for data in decoder.feed(piece):
                    done = data == "[DONE]"
                    token_ids += [] if done else _token_ids(data)
                if hang_up_after is not None and len(token_ids) >= hang_up_after:
                    reply.close()
                    return Reply(200, tuple(token_ids))
        if not done:
            raise StreamError(f"the stream ended after {len(token_ids)} tokens without [DONE]")
        return Reply(200, tuple(token_ids))

    async def hang_up(self, body: dict[str, Any], after_s: float) -> None:
        """Send a request and leave before it can be answered, most likely while its prompt is computed."""
        asked = asyncio.ensure_future(self.streamed(body))
        await asyncio.sleep(after_s)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    async def raw(self, wrong: Wrong) -> Reply:
        """Send a request as it is and return its status with the beginning of the body."""
        async with self._http.request(
            wrong.method, self._root + wrong.path, data=wrong.body, headers={"Content-Type": wrong.content_type}
        ) as reply:
            return Reply(reply.status, text=(await reply.text(errors="replace"))[:300])

    async def half_a_request(self, host: str, port: int) -> None:
        """Announce a body, send a part of it, and leave."""
        _, writer = await asyncio.open_connection(host, port)
        writer.write(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {_JSON}\r\n".encode()
            + b'Content-Length: 100000\r\n\r\n{"prompt": "'
        )
        await writer.drain()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)

    async def exposition(self) -> str:
        """Return the text of /metrics."""
        async with self._http.get(f"{self._root}/metrics") as reply:
            return await reply.text()

    def _post(self, body: dict[str, Any]) -> Any:
        return self._http.post(self._root + COMPLETIONS, data=json.dumps(body), headers={"Content-Type": _JSON})


def _token_ids(data: str) -> list[int]:
    event = json.loads(data)
    if "error" in event:
        raise StreamError(f"the server reports: {str(event['error'])[:200]}")
    choices = event.get("choices") or [{}]
    return choices[0].get("token_ids") or []
