from __future__ import annotations

from pathlib import Path

import pytest

from cache_router.errors import EngineError
from engine_workers.engine_log import MAX_LOG_BYTES, bound_log, last_lines, own_log


def test_a_log_begins_empty_and_stays_when_its_owner_is_done(tmp_path: Path) -> None:
    preferred = tmp_path / "new folder" / "engine-0.log"
    with own_log(preferred) as log_file:
        assert log_file == preferred
        log_file.write_text("said")
    assert preferred.read_text() == "said"
    with own_log(preferred):
        assert preferred.read_text() == ""


def test_no_two_owners_share_a_log(tmp_path: Path) -> None:
    preferred = tmp_path / "engine-0.log"
    with own_log(preferred) as first, own_log(preferred) as second, own_log(preferred) as third:
        names = [log_file.name for log_file in (first, second, third)]
        assert names == ["engine-0.log", "engine-0.2.log", "engine-0.3.log"]
    with own_log(preferred) as again:
        assert again == preferred


def test_a_log_that_cannot_be_written_is_an_engine_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngineError, match="cannot be written"), own_log(tmp_path / "file" / "log"):
        pass


def test_a_log_that_grew_too_large_begins_anew_under_the_writers_hands(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    with log_file.open("ab", buffering=0) as writer:
        writer.write(b"x" * MAX_LOG_BYTES)
        bound_log(log_file)
        assert log_file.stat().st_size == MAX_LOG_BYTES
        writer.write(b"y")
        bound_log(log_file)
        writer.write(b"z")
    assert log_file.read_bytes() == b"z"
    assert (tmp_path / "log.old").stat().st_size == MAX_LOG_BYTES + 1


def test_a_log_that_is_gone_has_not_grown(tmp_path: Path) -> None:
    bound_log(tmp_path / "none")


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    log_file = tmp_path / "log"
    log_file.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert last_lines(log_file, 2) == "line 99998\nline 99999"
