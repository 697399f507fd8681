"""What can be said of an image without a Docker engine: that it is given what it copies."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_gateways_image_copies_every_package_and_the_context_holds_what_it_copies() -> None:
    recipe = (ROOT / "docker/gateway.Dockerfile").read_text()
    copied = {
        source
        for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", recipe, re.MULTILINE)
        for source in sources.split()
    }
    admitted = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in copied} == {x for x in admitted if x.startswith("!")}
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied
