from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cache_router.errors import BlockCorruptError, BlockLostError, TierError
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.tiers.segment_file import Extent, scan
from engine_workers.tiers.ssd import SsdOptions, SsdTier
from engine_workers.tiers.tier import Tier
from tests.engine_workers.blocks.made_blocks import block_of, name_of
from tests.engine_workers.tiers.tier_contract import TierContract, header_list, load, store

MIB = 1024 * 1024


async def opened(
    folder: Path,
    capacity_bytes: int = 256 * MIB,
    *,
    durable: bool = False,
    evicted: list[BlockName] | None = None,
) -> SsdTier:
    def note(names: Sequence[BlockName]) -> None:
        if evicted is not None:
            evicted.extend(names)

    policy: S3Fifo[BlockName] = S3Fifo(capacity_bytes)
    return await SsdTier.open(SsdOptions(folder, 2, durable), policy, note)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.blocks"))


def place_of(folder: Path, name: BlockName) -> tuple[Path, Extent]:
    for path in files(folder):
        for extent, header in scan(path, int(path.stem)):
            if header.name == name:
                return path, extent
    raise KeyError(name)


def occupied_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in files(folder))


class SegmentRecords:
    """Records in the files; one that is cut short becomes zeros from there on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[BlockName, tuple[Path, Extent]] = {}

    async def read(self, name: BlockName) -> bytes:
        self._places[name] = path, extent = place_of(self._folder, name)
        with path.open("rb") as file:
            file.seek(extent.offset)
            return file.read(extent.head_bytes + extent.payload_bytes)

    async def write(self, name: BlockName, record: bytes) -> None:
        path, extent = self._places[name]
        with path.open("r+b") as file:
            file.seek(extent.offset)
            file.write(record.ljust(extent.head_bytes + extent.payload_bytes, b"\0"))


class TestSsdTier(TierContract):
    @pytest.fixture
    async def tier(self, tmp_path: Path) -> AsyncIterator[Tier]:
        tier = await opened(tmp_path)
        yield tier
        await tier.close()

    @pytest.fixture
    def raw(self, tmp_path: Path) -> SegmentRecords:
        return SegmentRecords(tmp_path)


async def test_the_next_process_finds_what_was_stored(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    stored = [await store(tier, number, 5000) for number in range(6)]
    await tier.remove([name_of(4)])
    usage = tier.usage()
    await tier.close()

    again = await opened(tmp_path)
    assert again.usage() == usage
    kept = [stored[number] for number in (0, 1, 2, 3, 5)]
    assert await header_list(again) == [header for header, _ in kept]
    for header, payload in kept:
        assert await load(again, header.name, len(payload)) == (header, payload)
    assert await again.contains([name_of(4)]) == [False]
    await again.close()


async def test_a_corrupt_block_does_not_come_back_with_the_next_process(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    header, payload = await store(tier, 1)
    raw = SegmentRecords(tmp_path)
    record = await raw.read(header.name)
    await raw.write(header.name, record[:-1] + b"x")
    with pytest.raises(BlockCorruptError, match="payload checksum"):
        await load(tier, header.name, len(payload))
    await tier.close()
    again = await opened(tmp_path)
    assert await again.contains([header.name]) == [False]
    await again.close()


async def test_a_file_that_a_crash_cut_off_keeps_its_whole_blocks(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    stored = [await store(tier, number, 10_000) for number in range(3)]
    await tier.close()
    path, extent = place_of(tmp_path, name_of(2))
    with path.open("r+b") as file:
        file.truncate(extent.offset + extent.head_bytes + 5000)
    again = await opened(tmp_path)
    assert await again.contains([name_of(0), name_of(1), name_of(2)]) == [True, True, False]
    assert path.stat().st_size == extent.offset
    for header, payload in stored[:2]:
        assert await load(again, header.name, len(payload)) == (header, payload)
    await again.close()


async def test_a_file_that_is_cut_off_while_it_is_used_loses_only_what_is_cut(
    tmp_path: Path,
) -> None:
    tier = await opened(tmp_path)
    kept = await store(tier, 1)
    await store(tier, 2)
    path, extent = place_of(tmp_path, name_of(2))
    with path.open("r+b") as file:
        file.truncate(extent.offset + extent.head_bytes + 5)
    with pytest.raises(BlockCorruptError, match="cut short"):
        await load(tier, name_of(2), 4096)
    assert await load(tier, name_of(1), 4096) == kept
    await tier.close()


async def test_behind_a_spoilt_header_the_next_block_is_found(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    for number in range(3):
        await store(tier, number, 20_000)
    await tier.close()
    path, extent = place_of(tmp_path, name_of(1))
    with path.open("r+b") as file:
        file.seek(extent.offset + 30)
        file.write(b"????")
    before = occupied_bytes(tmp_path)
    again = await opened(tmp_path)
    assert await again.contains([name_of(0), name_of(1), name_of(2)]) == [True, False, True]
    assert occupied_bytes(tmp_path) < before
    await again.close()


async def test_a_block_that_is_on_disk_twice_counts_once(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    header, payload = await store(tier, 1)
    await tier.close()
    path = files(tmp_path)[0]
    path.with_name(f"{7:016d}.blocks").write_bytes(path.read_bytes())
    again = await opened(tmp_path)
    assert again.usage().num_blocks == 1
    assert await load(again, header.name, len(payload)) == (header, payload)
    assert [file.stem for file in files(tmp_path)] == [f"{7:016d}"]
    await again.close()


async def test_capacity_holds_and_who_gives_way_is_told(tmp_path: Path) -> None:
    evicted: list[BlockName] = []
    tier = await opened(tmp_path, 4 * MIB, evicted=evicted)
    for number in range(0, 80, 2):  # even numbers only: nobody is anybody's parent
        await store(tier, number, 200_000)
        assert tier.usage().used_bytes <= 4 * MIB
        assert occupied_bytes(tmp_path) <= 4 * MIB
    names = [name_of(number) for number in range(0, 80, 2)]
    there = await tier.contains(names)
    assert [name for name, is_there in zip(names, there, strict=True) if not is_there] == evicted
    assert len(evicted) == 40 - tier.usage().num_blocks > 0
    await tier.close()

    again = await opened(tmp_path, 4 * MIB)
    assert await again.contains(names) == there
    await again.close()


async def test_files_that_hold_nothing_any_more_go_away(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 4 * MIB)
    for number in range(0, 200, 2):
        await store(tier, number, 200_000)
    assert len(files(tmp_path)) < 40
    await tier.close()


async def test_a_smaller_capacity_after_a_restart_is_kept(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    for number in range(0, 20, 2):
        await store(tier, number, 200_000)
    await tier.close()
    smaller = await opened(tmp_path, MIB)
    assert 0 < smaller.usage().used_bytes <= MIB
    assert occupied_bytes(tmp_path) <= MIB
    await smaller.close()


async def test_a_block_that_is_larger_than_the_tier_is_refused(tmp_path: Path) -> None:
    tier = await opened(tmp_path, MIB)
    await store(tier, 1)
    with pytest.raises(TierError, match="no room"):
        await store(tier, 3, 2 * MIB)
    assert await tier.contains([name_of(1), name_of(3)]) == [True, False]
    await tier.close()


async def test_blocks_are_loaded_stored_and_evicted_at_the_same_time(tmp_path: Path) -> None:
    tier = await opened(tmp_path, 2 * MIB)

    async def worker(first: int) -> int:
        num_loaded = 0
        for number in range(first, first + 40, 2):
            await store(tier, number, 100_000)
            for other in (number, number - 10, number + 2):
                try:
                    loaded = await load(tier, name_of(other), 100_000)
                except BlockCorruptError:
                    raise
                except BlockLostError:
                    continue
                assert loaded == block_of(other, 100_000)
                num_loaded += 1
        return num_loaded

    loaded = await asyncio.gather(*(worker(first) for first in (10, 20, 30, 1000)))
    assert all(loaded)
    assert tier.usage().used_bytes <= 2 * MIB
    await tier.close()


async def test_a_durable_block_is_stored_like_any_other(tmp_path: Path) -> None:
    tier = await opened(tmp_path, durable=True)
    block = await store(tier, 1)
    assert await load(tier, name_of(1), 4096) == block
    await tier.close()


async def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    with pytest.raises(TierError, match="another process"):
        await opened(tmp_path)
    await tier.close()
    await (await opened(tmp_path)).close()


async def test_a_folder_that_cannot_be_made_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="Not a directory"):
        await opened(tmp_path / "file" / "folder")


async def test_a_folder_that_cannot_be_read_back_is_let_go_of(tmp_path: Path) -> None:
    (tmp_path / f"{3:016d}.blocks").mkdir()
    with pytest.raises(TierError, match="Is a directory"):
        await opened(tmp_path)
    (tmp_path / f"{3:016d}.blocks").rmdir()
    await (await opened(tmp_path)).close()


async def test_a_full_disk_is_told_and_loses_nothing(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    kept = await store(tier, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(TierError, match="File too large"):
            await store(tier, 3, 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert await tier.contains([name_of(1), name_of(3)]) == [True, False]
    assert tier.usage().num_blocks == 1
    assert occupied_bytes(tmp_path) < MIB
    assert await load(tier, name_of(1), 4096) == kept
    later = await store(tier, 3, 2 * MIB)
    assert await load(tier, name_of(3), 2 * MIB) == later
    await tier.close()


async def test_a_folder_that_vanishes_costs_its_blocks_and_stores_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    tier = await opened(folder)
    await store(tier, 1)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(BlockLostError):
        await load(tier, name_of(1), 4096)
    assert await tier.contains([name_of(1)]) == [False]
    with pytest.raises(TierError, match="No such file"):
        await store(tier, 2)
    await tier.close()


async def test_a_block_in_anothers_place_is_not_told_of(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    raw = SegmentRecords(tmp_path)
    one, _ = await store(tier, 1)
    two, _ = await store(tier, 2)
    record = await raw.read(one.name)
    await raw.read(two.name)
    await raw.write(two.name, record)
    assert await header_list(tier) == [one]
    assert await tier.contains([two.name]) == [False]
    await tier.close()


async def test_headers_of_more_than_a_page_and_of_large_size_are_found(tmp_path: Path) -> None:
    tier = await opened(tmp_path)
    header, payload = block_of(1)
    long = replace(header, token_ids=tuple(range(8000)))
    await tier.store(long, memoryview(payload))
    after = (await store(tier, 2))[0]
    await tier.close()
    again = await opened(tmp_path)
    assert await header_list(again) == [long, after]
    assert await load(again, long.name, len(payload)) == (long, payload)
    await again.close()


WITHOUT_PERMISSION = """
import asyncio, os, sys
from pathlib import Path
from cache_router.errors import TierError
from tests.engine_workers.blocks.made_blocks import name_of
from tests.engine_workers.tiers.test_ssd import opened
from tests.engine_workers.tiers.tier_contract import load, store

async def told(call):
    try:
        await call
    except TierError as error:
        print(error)

async def main(folder):
    tier = await opened(folder)
    await store(tier, 1)
    for file in folder.glob("*.blocks"):
        file.chmod(0)
    await told(load(tier, name_of(1), 4096))
    await told(store(tier, 2))
    for file in folder.glob("*.blocks"):
        file.chmod(0o600)
    print(await tier.contains([name_of(1)]), len((await load(tier, name_of(1), 4096))[1]))
    await tier.close()
    folder.chmod(0)
    await told(opened(folder))
    folder.chmod(0o700)

if os.geteuid() == 0:  # who may do everything has no permission to lose
    os.setgid(65534)
    os.setuid(65534)
asyncio.run(main(Path(sys.argv[1])))
"""


def test_permission_that_is_taken_away_is_told_and_costs_no_block() -> None:
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() == 0:
            os.chown(folder, 65534, 65534)
        child = subprocess.run(
            [sys.executable, "-c", WITHOUT_PERMISSION, folder],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert child.stderr == ""
    assert child.stdout.splitlines() == [
        "tier ssd: Permission denied",
        "tier ssd: Permission denied",
        "[True] 4096",
        "tier ssd: Permission denied",
    ]
