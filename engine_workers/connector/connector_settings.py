"""What is written for the connector into vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cache_router.errors import ConfigurationError

CONNECTOR_NAME = "RadixgateConnector"
CONNECTOR_MODULE = "engine_workers.connector.radixgate_connector"

_SETTING = "--kv-transfer-config"
_Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=60.0)]


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `kv_connector_extra_config`."""

    socket: str
    """Path of the cache server's Unix socket; it need not exist yet."""
    lookup_deadline_s: _Seconds = 0.1
    """Seconds that a request waits for a first word of the server, which gives its tiers 0.03. A
    server that misses it is not waited for again until it says something."""
    stage_deadline_s: _Seconds = 10.0
    """Most seconds that a request waits for blocks that are on their way from a tier."""
    ring_slots: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    """Blocks that may wait to be saved; when all slots are taken, saves are dropped."""
    tenant_salt: str = ""
    """Separates deployments that share a store."""


def parse_settings(extra_config: Mapping[str, Any]) -> ConnectorSettings:
    """Read what the engine was started with.

    Raises:
        ConfigurationError: A key is missing, unknown, or has a value that cannot be.
    """
    try:
        return msgspec.convert(dict(extra_config), ConnectorSettings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(_SETTING, f"kv_connector_extra_config: {error}") from error


def require_recompute(load_failure_policy: str) -> None:
    """Refuse the policy under which one lost block is an error for a client.

    Raises:
        ConfigurationError: It is not `recompute`, and vLLM's default is not.
    """
    if load_failure_policy != "recompute":
        raise ConfigurationError(
            _SETTING,
            f'kv_load_failure_policy is "{load_failure_policy}"; set it to "recompute", so that a '
            "block that cannot be loaded is computed and no request fails for it",
        )


def transfer_config(socket: Path) -> str:
    """Return the value of `--kv-transfer-config` for an engine beside this cache server."""
    return json.dumps(
        {
            "kv_connector": CONNECTOR_NAME,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(socket)},
        }
    )
