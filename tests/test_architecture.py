"""Imports point one way: `gateway -> cache_router <- engine_workers`, and `radixgate` over all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cache_router", "engine_workers", "gateway", "radixgate")
ALLOWED = {
    "cache_router": set[str](),
    "engine_workers": {"cache_router"},
    "gateway": {"cache_router"},
    "radixgate": {"cache_router", "engine_workers", "gateway"},
}
HTTP_LIBRARIES = {
    "aiohttp",
    "fastapi",
    "h11",
    "http",
    "httptools",
    "httpx",
    "httpx2",
    "requests",
    "starlette",
    "urllib",
    "urllib3",
    "uvicorn",
}
# Scripts and plugins that run inside the engine's Python; the connector's one file is only ever
# imported by vLLM itself.
IMPORTS_VLLM_AT_ONCE = "engine_workers/connector/radixgate_connector.py"
RUN_INSIDE_THE_ENGINE = {
    IMPORTS_VLLM_AT_ONCE,
    "engine_workers/connector/plugin.py",
    "engine_workers/gguf_conversion.py",
}
ENGINE_LIBRARIES = {"accelerate", "gguf", "safetensors", "torch", "transformers", "vllm"}

# The settings model reads the environment for everybody. The others start processes, which inherit
# it, or run before there is a settings model.
READERS_OF_THE_ENVIRONMENT = {
    "engine_workers/checkout_setup.py",
    "engine_workers/end_with_parent.py",
    "engine_workers/model_store.py",
    "engine_workers/pip_run.py",
    "radixgate/serve.py",
    "radixgate/worker.py",
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(nodes: Iterator[ast.AST]) -> set[str]:
    """Top-level names of what these nodes import."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add((node.module or "").partition(".")[0])
    return found


def outside_of_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from outside_of_functions(child)


def imported_by(module: Path) -> set[str]:
    return imports(ast.walk(ast.parse(module.read_text())))


def imported_at_once_by(module: Path) -> set[str]:
    return imports(outside_of_functions(ast.parse(module.read_text())))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    forbidden = {*PACKAGES, "benchmarks", "tests"} - {package} - ALLOWED[package]
    wrong = {
        str(module.relative_to(ROOT)): names
        for module in modules(package)
        if (names := imported_by(module) & forbidden)
    }
    assert wrong == {}


def test_the_router_does_no_http() -> None:
    wrong = {
        module.name: names
        for module in modules("cache_router")
        if (names := imported_by(module) & HTTP_LIBRARIES)
    }
    assert wrong == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_an_engines_libraries_when_it_is_imported(package: str) -> None:
    wrong = {
        str(module.relative_to(ROOT)): names
        for module in modules(package)
        if (names := imported_at_once_by(module) & ENGINE_LIBRARIES)
    }
    assert wrong.keys() <= {IMPORTS_VLLM_AT_ONCE}


def test_only_a_script_that_runs_inside_the_engines_python_imports_its_libraries_at_all() -> None:
    importing = {
        str(module.relative_to(ROOT))
        for package in PACKAGES
        for module in modules(package)
        if imported_by(module) & ENGINE_LIBRARIES
    }
    assert importing == RUN_INSIDE_THE_ENGINE


def reads_the_environment(module: Path) -> bool:
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            return True
    return False


def test_nobody_else_reads_the_environment() -> None:
    reading = {
        str(module.relative_to(ROOT))
        for package in PACKAGES
        for module in modules(package)
        if reads_the_environment(module)
    }
    assert reading == READERS_OF_THE_ENVIRONMENT
