"""One streamed chat request, timed, with what the engine says of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2


@dataclass(frozen=True, slots=True)
class Measured:
    """One answer."""

    ttft_s: float
    total_s: float
    text: str
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    prompt_tokens: int
    cached_tokens: int
    headers: Mapping[str, str]


async def measure_chat(
    client: httpx2.AsyncClient,
    base_url: str,
    model: str,
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
) -> Measured:
    """Stream one chat completion, greedily and to its full length."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    began_s = time.perf_counter()
    ttft_s = 0.0
    text: list[str] = []
    prompt_ids: list[int] = []
    output_ids: list[int] = []
    usage: dict[str, Any] = {}
    async with client.stream("POST", f"{base_url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            ttft_s = ttft_s or time.perf_counter() - began_s
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(line)
            prompt_ids = event.get("prompt_token_ids") or prompt_ids
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text.append(choice["delta"].get("content") or "")
                output_ids += choice.get("token_ids") or []
        headers = dict(response.headers)
    return Measured(
        ttft_s=ttft_s,
        total_s=time.perf_counter() - began_s,
        text="".join(text),
        prompt_token_ids=prompt_ids,
        output_token_ids=output_ids,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        headers=headers,
    )
