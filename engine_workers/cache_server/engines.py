"""Which engines are connected, with which processes, and that each keeps to one namespace."""

from __future__ import annotations

from dataclasses import dataclass, field
from socket import socket

import msgspec

from engine_workers.blocks.namespace import Fingerprint, Namespace
from engine_workers.cache_server.engine_process import EngineProcess, peer_pid


@dataclass(slots=True)
class _Engine:
    namespace: Namespace
    processes: list[EngineProcess] = field(default_factory=list)
    fingerprints: set[Fingerprint] = field(default_factory=set)
    num_connections: int = 0


class Engines:
    """The engines of this node. What is kept of one goes when its last process has ended."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._block_bytes: dict[Fingerprint, int] = {}

    def __len__(self) -> int:
        """Engines that are connected, or not known to have ended."""
        return len(self._engines)

    def refusal(self, engine_id: str, namespace: Namespace, block_bytes: int) -> str | None:
        """Say why an engine cannot be served, naming what differs; None if it can."""
        known = self._engines.get(engine_id)
        if known is not None:
            # The ranks of an engine have blocks of their own, and are one engine all the same.
            other = msgspec.structs.replace(known.namespace, tp_rank=namespace.tp_rank)
            differences = namespace.differences(other)
            if differences:
                told = ", ".join(
                    f"{name} is {new!r} and was {old!r}"
                    for name, (new, old) in sorted(differences.items())
                )
                return f"engine {engine_id[:64]!r} is known with another namespace: {told}"
        expected = self._block_bytes.get(namespace.fingerprint, block_bytes)
        if block_bytes != expected:
            return f"block_bytes is {block_bytes}, and {expected} for others of this namespace"
        return None

    def join(
        self, engine_id: str, namespace: Namespace, block_bytes: int, connection: socket
    ) -> EngineProcess:
        """Note a connection of an engine that is not refused."""
        self._block_bytes[namespace.fingerprint] = block_bytes
        engine = self._engines.setdefault(engine_id, _Engine(namespace))
        process = _known_process(engine, peer_pid(connection))
        if process is None:
            process = EngineProcess(connection)
            engine.processes.append(process)
        engine.fingerprints.add(namespace.fingerprint)
        engine.num_connections += 1
        return process

    def leave(self, engine_id: str) -> None:
        """Note that a connection of an engine ended."""
        self._engines[engine_id].num_connections -= 1

    def is_gone(self, engine_id: str) -> bool:
        """Whether none of an engine's processes is left."""
        engine = self._engines.get(engine_id)
        return engine is None or (
            engine.num_connections == 0 and all(process.is_gone() for process in engine.processes)
        )

    def close(self) -> None:
        """Stop watching all of them."""
        for engine in self._engines.values():
            for process in engine.processes:
                process.close()
        self._engines.clear()

    def forget_gone(self) -> None:
        """Let go of engines that have ended, and of their processes."""
        for engine_id in [known for known in self._engines if self.is_gone(known)]:
            for process in self._engines.pop(engine_id).processes:
                process.close()
        alive = {
            fingerprint for engine in self._engines.values() for fingerprint in engine.fingerprints
        }
        for engine in self._engines.values():
            _close_ended(engine)
        for fingerprint in self._block_bytes.keys() - alive:
            del self._block_bytes[fingerprint]


def _known_process(engine: _Engine, pid: int) -> EngineProcess | None:
    """Keep an engine that reconnects for ever from taking a descriptor each time."""
    for process in engine.processes:
        if process.pid == pid and process.is_known_to_live():
            return process
    return None


def _close_ended(engine: _Engine) -> None:
    """Let go of those processes of a living engine that have ended."""
    for process in engine.processes:
        if process.is_gone():
            process.close()
    engine.processes = [process for process in engine.processes if not process.is_gone()]
