from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fifo import Fifo

STAND_IN_VLLM = Path(__file__).parent / "stand_in_vllm"
MAIN = "from radixgate.cli import main; main()"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    opened = Fifo(tmp_path / "fifo")
    yield opened
    opened.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    return folder


@pytest.fixture
def environment(tmp_path: Path, fifo: Fifo) -> dict[str, str]:
    """What makes `radixgate` start stand-in engines."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STAND_IN_VLLM} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RADIXGATE_")}
    return inherited | {
        "RADIXGATE_ENGINE_PYTHON": str(python),
        "RADIXGATE_ENGINE_KV_CACHE_BYTES": "1000000",
        "RADIXGATE_ENGINE_LOG_DIR": str(tmp_path / "logs"),
        "STAND_IN_FIFO": fifo.path,
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """Start the real command; it is killed at the end of the test if it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start_command(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments],
            env=environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start_command
    for process in started:
        process.kill()
        process.communicate()
