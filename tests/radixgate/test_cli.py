from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError, EngineError
from engine_workers.ports import any_free_ports
from radixgate.cli import fail
from tests.radixgate.conftest import Start


def refused(start: Start, *arguments: str, **variables: str) -> str:
    """Run a command that must end with status 2, one line on stderr and nothing on stdout."""
    process = start(*arguments, **variables)
    output, errors = process.communicate()
    assert process.returncode == 2, errors
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("radixgate: ")
    return errors.removeprefix("radixgate: ")


def test_version_is_printed(start: Start) -> None:
    output, errors = start("version").communicate()
    assert (output, errors) == ("radixgate 0.1.0\n", "")


@pytest.mark.parametrize("command", ["serve", "gateway", "worker"])
def test_help_has_examples_that_keep_their_lines(start: Start, command: str) -> None:
    output, _ = start(command, "--help").communicate()
    assert f"\n    radixgate {command}" in output


def test_without_a_command_the_help_is_shown(start: Start) -> None:
    process = start()
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert "Commands:" in output


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("command", ("fly",)),
        ("--no-such-flag", ("serve", "--no-such-flag")),
        ("--worker", ("gateway", "--worker")),
        ("--engines", ("serve", "--engines", "no")),
        ("--engines", ("serve", "--engines", "0")),
        ("--port", ("gateway", "--port", "70000")),
        ("--kv-cache-gib", ("serve", "--kv-cache-gib", "nan")),
        ("--kv-cache-gib", ("worker", "--kv-cache-gib", "inf")),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_flag(
    start: Start, named: str, arguments: tuple[str, ...]
) -> None:
    assert refused(start, *arguments).startswith(f"{named}: ")


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (EngineError("it died"), 1, "it died"),
        (ExceptionGroup("", [ExceptionGroup("", [EngineError("it died")])]), 1, "it died"),
        (
            ExceptionGroup("", [EngineError("it died"), ConfigurationError("PORT", "taken")]),
            2,
            "PORT: taken",
        ),
    ],
)
def test_the_error_that_matters_most_is_told_on_one_line(
    error: Exception, status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fail(error)
    assert ended.value.code == status
    assert capsys.readouterr().err == f"radixgate: {line}\n"


def test_a_bug_among_the_errors_is_not_hidden() -> None:
    with pytest.raises(ExceptionGroup):
        fail(ExceptionGroup("", [EngineError("it died"), ValueError("a bug")]))


@pytest.mark.parametrize("command", ["serve", "gateway", "worker"])
def test_a_wrong_variable_is_named_with_its_value(start: Start, command: str) -> None:
    line = refused(start, command, RADIXGATE_HEADER_TIMEOUT_S="soon")
    assert line.startswith("RADIXGATE_HEADER_TIMEOUT_S: ")
    assert "'soon'" in line


def test_a_flag_wins_over_the_environment_and_is_named_as_a_flag(start: Start) -> None:
    line = refused(start, "serve", "--engines", "65", RADIXGATE_ENGINES="3")
    assert line.startswith("--engines: ")


def test_a_gateway_without_workers_is_refused(start: Start) -> None:
    assert refused(start, "gateway").startswith("--worker: ")


@pytest.mark.parametrize("url", ["nonsense", "ftp://h:1", "http://", "http://h:99999"])
def test_a_worker_that_is_no_url_is_refused(start: Start, url: str) -> None:
    assert refused(start, "gateway", "--port", "0", "--worker", url).startswith("--worker: ")


def test_a_taken_port_is_refused_by_every_command(start: Start, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        lines = [
            refused(start, "serve", "--model", str(model), "--port", port),
            refused(start, "worker", "--model", str(model), "--port", port),
            refused(start, "gateway", "--worker", "http://127.0.0.1:1", "--port", port),
        ]
    assert [line.split(":")[0] for line in lines] == ["RADIXGATE_PORT", "--port", "RADIXGATE_PORT"]
    assert all(port in line for line in lines)


@pytest.mark.parametrize("command", ["serve", "worker"])
def test_a_broken_model_folder_names_the_file(start: Start, model: Path, command: str) -> None:
    (model / "tokenizer.json").unlink()
    line = refused(start, command, "--model", str(model), "--port", str(any_free_ports(1)[0]))
    assert line.startswith("RADIXGATE_MODEL: ")
    assert "tokenizer.json" in line


def test_too_little_memory_is_refused_before_anything_starts(start: Start, model: Path) -> None:
    line = refused(start, "serve", "--port", "0", "--model", str(model), "--kv-cache-gib", "1e6")
    assert line.startswith("RADIXGATE_ENGINES: too little memory")


def test_a_template_that_is_not_there_is_refused(start: Start, model: Path) -> None:
    arguments = ("--port", "0", "--model", str(model), "--chat-template", "/no/template")
    assert refused(start, "serve", *arguments).startswith("RADIXGATE_CHAT_TEMPLATE: ")


def test_a_log_folder_that_cannot_be_made_is_refused(start: Start, model: Path) -> None:
    logs = str(model / "config.json" / "logs")
    arguments = ("--port", "0", "--model", str(model))
    line = refused(start, "serve", *arguments, RADIXGATE_ENGINE_LOG_DIR=logs)
    assert line.startswith(f"RADIXGATE_ENGINE_LOG_DIR: logs cannot be written to {logs} ")


def test_an_engine_python_without_vllm_is_refused(start: Start, model: Path) -> None:
    arguments = ("--port", "0", "--model", str(model))
    line = refused(start, "serve", *arguments, RADIXGATE_ENGINE_PYTHON="/bin/false")
    assert line.startswith("RADIXGATE_ENGINE_PYTHON: ")


def test_a_key_is_not_repeated_in_an_error(start: Start) -> None:
    process = start("gateway", RADIXGATE_WORKER_API_KEY="sk-secret", RADIXGATE_PORT="x")
    _, errors = process.communicate()
    assert "sk-secret" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_gateway_cleanly(start: Start, number: signal.Signals) -> None:
    (port,) = any_free_ports(1)
    process = start("gateway", "--port", str(port), "--worker", "http://127.0.0.1:1")
    assert process.stdout is not None
    assert process.stdout.readline() == f"listening on http://127.0.0.1:{port}\n"
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in errors
