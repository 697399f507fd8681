from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.connector.connector_settings import (
    ConnectorSettings,
    parse_settings,
    require_recompute,
    transfer_config,
)


def test_what_the_launcher_writes_is_what_the_connector_reads() -> None:
    config = json.loads(transfer_config(Path("/run/cache.sock")))
    require_recompute(config["kv_load_failure_policy"])
    settings = parse_settings(config["kv_connector_extra_config"])
    assert settings == ConnectorSettings(socket="/run/cache.sock")


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"socket": 5},
        {"socket": "s", "sokcet": "s"},
        {"socket": "s", "lookup_deadline_s": 0.0},
        {"socket": "s", "lookup_deadline_s": "soon"},
        {"socket": "s", "ring_slots": 0},
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_settings(extra)
    assert str(caught.value).startswith("--kv-transfer-config: kv_connector_extra_config: ")
    assert "\n" not in str(caught.value)


def test_vllms_default_of_failing_a_request_for_a_lost_block_is_refused() -> None:
    with pytest.raises(ConfigurationError, match='set it to "recompute"'):
        require_recompute("fail")
