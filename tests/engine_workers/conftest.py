from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_workers.fifo import Fifo


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Fifo]:
    opened = Fifo(tmp_path / "fifo")
    yield opened
    opened.close()
