"""What a `--worker` option says: a URL, and what is given about it instead of discovered."""

from __future__ import annotations

from dataclasses import dataclass

from cache_router.errors import ConfigurationError
from cache_router.worker_registry import EventEndpoint, ServedModel
from gateway.upstream_client import Origin


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker as configured.

    `URL[,model=NAME][,max-model-len=N][,events=E[,replay=R]][,cache=URL]`.
    """

    url: str
    origin: Origin
    model: ServedModel | None = None
    """Given instead of asking /v1/models."""
    events: EventEndpoint | None = None
    """Given instead of asking /kv_event_sources."""
    cache_url: str | None = None
    """Its node's cache server."""

    @classmethod
    def parse(cls, text: str) -> WorkerSpec:
        """Read the option's value.

        Raises:
            ConfigurationError: It is not of that form.
        """
        url, *parts = text.strip().split(",")
        url = url.rstrip("/")
        origin = Origin.parse(url)
        given: dict[str, str] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if name not in ("model", "max-model-len", "events", "replay", "cache") or not value:
                raise ConfigurationError(
                    "--worker",
                    f"{part!r} is not known; a URL may be followed by model=NAME, "
                    "max-model-len=N, events=ENDPOINT, replay=ENDPOINT, cache=URL",
                )
            given[name] = value
        cache_url = given.get("cache")
        if cache_url is not None:
            cache_url = cache_url.rstrip("/")
            Origin.parse(cache_url)
        return cls(url, origin, _given_model(given), _given_events(given), cache_url)


def _given_model(given: dict[str, str]) -> ServedModel | None:
    limit = given.get("max-model-len")
    if limit is not None and not (limit.isdecimal() and len(limit) < 10 and int(limit) > 0):
        raise ConfigurationError("--worker", f"max-model-len={limit!r} is not a number of tokens")
    name = given.get("model")
    if name is None:
        if limit is not None:
            raise ConfigurationError("--worker", "max-model-len needs model=NAME beside it")
        return None
    return ServedModel(
        name=name,
        root=name,
        max_model_len=None if limit is None else int(limit),
        parent=None,
        created=0,
        owned_by="",
    )


def _given_events(given: dict[str, str]) -> EventEndpoint | None:
    endpoint, replay = given.get("events"), given.get("replay")
    if endpoint is None:
        if replay is not None:
            raise ConfigurationError("--worker", "replay needs events=ENDPOINT beside it")
        return None
    for value in (endpoint, replay):
        if value is not None and not value.startswith(("tcp://", "ipc://")):
            raise ConfigurationError(
                "--worker", f"{value!r} is no event endpoint; give tcp://host:port or ipc://path"
            )
    return EventEndpoint(endpoint, replay)
