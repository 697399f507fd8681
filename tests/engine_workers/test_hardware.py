from __future__ import annotations

from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.hardware import (
    available_memory_bytes,
    require_cpu_engine_support,
    share_cores,
    usable_cores,
)


def cpuinfo(folder: Path, flags: str) -> Path:
    file = folder / "cpuinfo"
    file.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbogomips\t: 1\n")
    return file


def test_a_cpu_with_avx2_is_supported(tmp_path: Path) -> None:
    require_cpu_engine_support("linux", "x86_64", cpuinfo(tmp_path, "sse2 fma f16c avx avx2"))


def test_a_cpu_without_avx2_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no avx2"):
        require_cpu_engine_support("linux", "x86_64", cpuinfo(tmp_path, "sse2 fma f16c avx"))


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "riscv64")])
def test_what_the_cpu_build_is_not_made_for_is_refused(
    tmp_path: Path, system: str, machine: str
) -> None:
    with pytest.raises(ConfigurationError):
        require_cpu_engine_support(system, machine, cpuinfo(tmp_path, "avx2 fma f16c"))


def memory(folder: Path, *, available_kib: int) -> Path:
    (folder / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kib} kB\n")
    return folder


def test_available_memory_is_the_kernels_estimate_without_a_container(tmp_path: Path) -> None:
    proc = memory(tmp_path, available_kib=1000)
    assert available_memory_bytes(proc, tmp_path / "none") == 1000 * 1024


def test_a_containers_limit_counts_but_not_against_its_cached_files(tmp_path: Path) -> None:
    proc = memory(tmp_path, available_kib=1_000_000)
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 2000\ninactive_file 400\n")
    assert available_memory_bytes(proc, tmp_path) == 2400


def test_a_container_without_a_limit_is_as_large_as_the_machine(tmp_path: Path) -> None:
    proc = memory(tmp_path, available_kib=7)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("3000\n")
    assert available_memory_bytes(proc, tmp_path) == 7 * 1024


def topology(folder: Path, siblings: dict[int, str]) -> Path:
    for cpu, text in siblings.items():
        place = folder / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "thread_siblings_list").write_text(text + "\n")
    return folder


def test_one_logical_cpu_of_each_core_is_used(tmp_path: Path) -> None:
    cpus = topology(tmp_path, {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5", 2: "2-3", 3: "2-3"})
    assert usable_cores([0, 1, 2, 3, 4, 5], cpus, tmp_path) == [0, 1, 2]


def test_only_allowed_cpus_are_used(tmp_path: Path) -> None:
    cpus = topology(tmp_path, {0: "0,4", 4: "0,4", 1: "1,5", 5: "1,5"})
    assert usable_cores([4, 5], cpus, tmp_path) == [4, 5]


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [("250000 100000", [0, 1, 2]), ("50000 100000", [0]), ("max 100000", [0, 1, 2, 3])],
)
def test_a_cpu_quota_limits_the_cores(tmp_path: Path, cpu_max: str, expected: list[int]) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max + "\n")
    assert usable_cores([0, 1, 2, 3], tmp_path, tmp_path) == expected


@pytest.mark.parametrize("num_cores", range(1, 40))
@pytest.mark.parametrize("num_engines", [1, 2, 3, 8])
def test_no_two_engines_share_a_core_unless_there_are_too_few(
    num_cores: int, num_engines: int
) -> None:
    cores = list(range(0, 2 * num_cores, 2))
    shares = share_cores(cores, num_engines)
    given = [cpu for share in shares for cpu in share]
    assert len(shares) == num_engines
    assert all(shares)
    assert set(given) <= set(cores)
    if num_engines <= num_cores:
        assert len(given) == len(set(given))
    else:
        assert max(given.count(cpu) for cpu in cores) == -(-num_engines // num_cores)
