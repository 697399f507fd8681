"""Sending prompts through the gateway for the sake of the blocks that they leave behind."""

from __future__ import annotations

import urllib.request
from pathlib import Path
from urllib.error import HTTPError, URLError

import msgspec

from cache_router.errors import ConfigurationError, EngineError

_TIMEOUT_S = 600.0


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def warm_prompts(path: Path, url: str) -> int:
    """Send each line of a file as a request for one token, in order.

    Args:
        path: A line is a JSON object, the body of a completion or a chat completion, or else the
            text of a prompt. Empty lines are skipped.
        url: The gateway's.

    Returns:
        How many were sent.

    Raises:
        ConfigurationError: The file cannot be read, or nobody answers at the URL.
        EngineError: A prompt was not answered; it names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("PROMPTS", f"{path} cannot be read: {error}") from error
    base = url.rstrip("/").removesuffix("/v1")
    model: str | None = None
    num_sent = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        body = _body_of(line)
        if "model" not in body:
            model = model or _first_model(base)
            body["model"] = model
        route = "chat/completions" if "messages" in body else "completions"
        limit = "max_completion_tokens" if "messages" in body else "max_tokens"
        sent = {key: body[key] for key in body if key not in ("stream", "stream_options", "n")}
        sent[limit] = 1
        _post(f"{base}/v1/{route}", sent, number)
        num_sent += 1
    return num_sent


def _body_of(line: str) -> dict[str, object]:
    try:
        body: dict[str, object] = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError:
        return {"prompt": line}
    return body


def _first_model(base: str) -> str:
    try:
        with urllib.request.urlopen(f"{base}/v1/models", timeout=_TIMEOUT_S) as answer:
            models = msgspec.json.decode(answer.read(), type=_Models)
    except (URLError, OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigurationError("--url", f"no gateway answers at {base}: {error}") from error
    if not models.data:
        raise ConfigurationError("--url", f"the gateway at {base} serves no model yet")
    return models.data[0].id


def _post(url: str, body: dict[str, object], line_number: int) -> None:
    request = urllib.request.Request(
        url, msgspec.json.encode(body), {"content-type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            answer.read()
    except HTTPError as error:
        with error:
            raise EngineError(f"line {line_number}: status {error.code}") from error
    except (URLError, OSError, ValueError) as error:
        raise ConfigurationError("--url", f"no gateway answers at {url}: {error}") from error
