from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fifo import Fifo

STAND_IN = str(Path(__file__).with_name("stand_in.py"))


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    opened = Fifo(tmp_path / "fifo")
    yield opened
    opened.close()
