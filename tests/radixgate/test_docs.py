from __future__ import annotations

import re
from pathlib import Path

import pytest

from cache_router.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_setting_is_documented_and_no_other_one() -> None:
    documented = re.findall(
        r"^\| `(RADIXGATE_\w+)`", (ROOT / "docs/configuration.md").read_text(), re.M
    )
    assert documented == [f"RADIXGATE_{name.upper()}" for name in Settings.model_fields]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_variables_that_a_page_names_exist(page: Path) -> None:
    known = {f"RADIXGATE_{name.upper()}" for name in Settings.model_fields}
    assert set(re.findall(r"RADIXGATE_[A-Z0-9_]*[A-Z0-9]", page.read_text())) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_into_the_repository_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_place_is_left_to_be_filled_in(page: Path) -> None:
    assert not re.search(r"@@|TODO|TBD|XXX", page.read_text())
