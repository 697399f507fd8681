"""Where figures go: one JSON file a benchmark, with what they were measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write `result` with the machine and the commit; return the file."""
    FOLDER.mkdir(exist_ok=True)
    file = FOLDER / f"{name}.json"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
        cwd=FOLDER,
    ).stdout.strip()
    content = {
        "benchmark": name,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "machine": {
            "cpu": _cpu_name(),
            "cores": os.cpu_count(),
            "memory_gib": round(_memory_bytes() / 1024**3, 1),
            "python": platform.python_version(),
        },
        **result,
    }
    file.write_text(json.dumps(content, indent=2) + "\n")
    return file


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
