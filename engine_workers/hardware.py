"""What this machine has: cores, memory, CPU features, NVIDIA GPUs.

Standard library only, because the bootstrap asks before anything is installed. Paths are arguments
so that tests can describe a machine they do not run on.
"""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from cache_router.errors import ConfigurationError

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_NVIDIA_SMI_TIMEOUT_S = 10.0


def require_cpu_engine_support(
    system: str = sys.platform,
    machine: str | None = None,
    cpuinfo: Path = _PROC / "cpuinfo",
) -> None:
    """Check that vLLM's CPU build can run here.

    Its x86 kernels are compiled for AVX2 and for AVX-512; there is none for less.

    Raises:
        ConfigurationError: It cannot; says what is missing.
    """
    machine = machine or platform.machine()
    if system != "linux":
        raise ConfigurationError(
            "RADIXGATE_ENGINE_PYTHON",
            f"vLLM's CPU build needs Linux, this is {system}; use a Linux machine or VM",
        )
    if machine in ("aarch64", "arm64"):
        return
    if machine not in ("x86_64", "AMD64"):
        raise ConfigurationError(
            "RADIXGATE_ENGINE_PYTHON",
            f"vLLM's CPU build is for x86-64 and ARM64, this CPU is {machine}",
        )
    flags = _cpu_flags(cpuinfo)
    missing = sorted({"avx2", "fma", "f16c"} - flags)
    if missing:
        raise ConfigurationError(
            "CPU",
            f"this CPU has no {', '.join(missing)}, which vLLM's CPU build needs; use a machine "
            "with AVX2, or pass the host's CPU through to the virtual machine",
        )


def _cpu_flags(cpuinfo: Path) -> set[str]:
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return set(value.split())
    return set()


def available_memory_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Memory that new processes can take without swapping, the container's limit included."""
    available = 0
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit = _read_number(cgroup / "memory.max")
    used = _read_number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    # Cached file pages count as used, but the kernel gives them back when they are needed.
    reclaimable = 0
    for line in (cgroup / "memory.stat").read_text().splitlines():
        if line.startswith("inactive_file "):
            reclaimable = int(line.split()[1])
    return min(available, max(limit - used + reclaimable, 0))


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):  # "max" means no limit
        return None


def usable_cores(
    allowed: Iterable[int] | None = None, cpus: Path = _CPUS, cgroup: Path = _CGROUP
) -> list[int]:
    """One logical CPU of each physical core that this process may use, ascending.

    Two hyperthreads of a core only take the vector units from each other, so one is enough. A CPU
    quota (containers) shortens the list: more threads than quota are throttled, all at once.
    """
    allowed = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    cores: list[int] = []
    seen: set[int] = set()
    for cpu in allowed:
        if cpu not in seen:
            cores.append(cpu)
            seen |= _siblings(cpu, cpus)
    quota = _cpu_quota(cgroup)
    return cores if quota is None else cores[: max(1, math.ceil(quota))]


def _siblings(cpu: int, cpus: Path) -> set[int]:
    try:
        text = (cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
    except FileNotFoundError:
        return {cpu}
    siblings = {cpu}
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        siblings |= set(range(int(first), int(last or first) + 1))
    return siblings


def _cpu_quota(cgroup: Path) -> float | None:
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def share_cores(cores: list[int], num_engines: int) -> list[tuple[int, ...]]:
    """Give each engine cores of its own; engines share one only if there are too few.

    Args:
        cores: Logical CPUs, ascending; neighbours are near each other, so shares are contiguous.
        num_engines: How many shares to make.

    Returns:
        One non-empty tuple of logical CPUs an engine.
    """
    if num_engines >= len(cores):
        return [(cores[i % len(cores)],) for i in range(num_engines)]
    size = len(cores) // num_engines
    # With this many cores, the engine's scheduler and HTTP server deserve one for themselves.
    threads = size - 1 if size >= 4 else size
    return [tuple(cores[i * size : i * size + threads]) for i in range(num_engines)]


def count_nvidia_gpus() -> int:
    """GPUs that `nvidia-smi` lists, 0 if there is none or no driver."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--list-gpus"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    if listed.returncode != 0:
        return 0
    return sum(1 for line in listed.stdout.splitlines() if line.startswith("GPU "))
