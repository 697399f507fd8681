"""A vLLM plugin: makes the connector known by its short name, without importing anything of it.

vLLM calls this in each of its processes. It imports vLLM only here, inside of vLLM, and no more of
it than what vLLM has loaded already.
"""

from __future__ import annotations

from engine_workers.connector.connector_settings import CONNECTOR_MODULE, CONNECTOR_NAME


def register() -> None:
    """Called by vLLM in each of its processes, more than once in some."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # type: ignore[import-not-found]  # only the engine has it
        KVConnectorFactory,
    )

    try:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, CONNECTOR_MODULE, CONNECTOR_NAME)
    except ValueError:
        # It says that the name is taken: by ourselves, when this is not the first call.
        return
