from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
import venv
import zipfile
from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.environments import Environment, InstallStep
from engine_workers.progress import StepProgress

NAME = "radixgate_stand_in"


def write_wheel(folder: Path, version: str) -> None:
    info = f"{NAME}-{version}.dist-info"
    contents = {
        f"{NAME}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in contents)
    with zipfile.ZipFile(folder / f"{NAME}-{version}-py3-none-any.whl", "w") as wheel:
        for name, content in contents.items():
            wheel.writestr(name, content)


class Machine:
    """An environment that gets its one package from a folder of wheels, without any network."""

    def __init__(self, folder: Path, empty: Path, fallback_index: str | None = None) -> None:
        # Making one takes seconds; a copy is as good as long as it stays empty.
        shutil.copytree(empty, folder / "env", symlinks=True)
        self.lock = folder / "lock.txt"
        self.lock.write_text(f"# pinned\n{NAME}==1.0\n")
        self.wheels = folder / "wheels"
        self.wheels.mkdir()
        self.empty_index = folder / "empty-index"
        self.empty_index.mkdir()
        self.logs = folder / "logs"
        self.output = io.StringIO()
        self._folder = folder / "env"
        self._fallback_index = fallback_index

    def environment(self, *, covers: tuple[Path, ...] = ()) -> Environment:
        """As each new process sees it."""
        arguments = ["--index-url", self.empty_index.as_uri(), "-r", str(self.lock)]
        if self._fallback_index is None:
            arguments += ["--find-links", str(self.wheels)]
        step = InstallStep("packages", self.lock, tuple(arguments), covers, self._fallback_index)
        return Environment(self._folder, [step], self.logs)

    def install(self, **options: tuple[Path, ...]) -> Environment:
        environment = self.environment(**options)
        progress = StepProgress(self.output, num_steps=1)
        for step in environment.pending():
            environment.install(step, progress)
        return environment

    @property
    def site_packages(self) -> Path:
        (found,) = self._folder.glob("lib/python3*/site-packages")
        return found

    @property
    def installed(self) -> str:
        return (self.site_packages / f"{NAME}.py").read_text().split("'")[1]


@pytest.fixture(scope="module")
def empty_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty") / "env"
    venv.create(folder, with_pip=True)
    return folder


@pytest.fixture
def machine(tmp_path: Path, empty_environment: Path) -> Machine:
    made = Machine(tmp_path, empty_environment)
    write_wheel(made.wheels, "1.0")
    write_wheel(made.wheels, "2.0")
    return made


def test_nothing_is_pending_once_it_is_installed(machine: Machine) -> None:
    assert machine.environment().pending()
    machine.install()
    assert machine.installed == "1.0"
    assert machine.environment().pending() == []


def test_a_changed_lock_is_installed_over_the_old_one(machine: Machine) -> None:
    machine.install()
    machine.lock.write_text(f"{NAME}==2.0\n")
    machine.install()
    assert machine.installed == "2.0"


def test_progress_is_shown_with_the_step_and_how_far_it_is(machine: Machine) -> None:
    machine.install()
    lines = machine.output.getvalue().splitlines()
    assert lines[0] == "[1/1] packages ..."
    assert any("1 of 1 packages" in line for line in lines)
    assert lines[-1].startswith("[1/1] packages: done (")


def test_an_install_that_was_cut_off_is_done_again_from_an_empty_environment(
    machine: Machine,
) -> None:
    machine.install()
    left_over = machine.site_packages / "half_written.py"
    left_over.touch()
    # What the mark of an unfinished step looks like after a power cut.
    (machine.environment().folder / "radixgate-unfinished").touch()
    assert machine.environment().pending()
    machine.install()
    assert machine.installed == "1.0"
    assert not left_over.exists()
    assert machine.environment().pending() == []


class Interrupting(StepProgress):
    """Ctrl-C as soon as pip says what it does."""

    def update(self, share_done: float, detail: str) -> None:
        if detail != "starting pip":
            raise KeyboardInterrupt


def test_ctrl_c_during_a_download_keeps_what_is_there(machine: Machine) -> None:
    environment = machine.install()
    machine.lock.write_text(f"{NAME}==2.0\n")
    (step,) = environment.pending()
    # No package can be collected from nowhere, and pip tries for a while.
    step = dataclasses.replace(
        step, arguments=(f"{NAME} @ http://192.0.2.1/{NAME}-3.0-py3-none-any.whl",)
    )
    with pytest.raises(KeyboardInterrupt):
        environment.install(step, Interrupting(machine.output, num_steps=1))
    assert machine.installed == "1.0"
    assert machine.environment().pending()
    machine.install()
    assert machine.installed == "2.0"


def test_an_environment_whose_python_is_gone_must_be_made_again(machine: Machine) -> None:
    environment = machine.install()
    environment.python.unlink()
    environment.python.symlink_to("/nowhere/python3")
    assert machine.environment().pending()


def test_a_failure_names_the_requirements_the_reason_and_the_log(machine: Machine) -> None:
    machine.lock.write_text(f"{NAME}==9.0\n")
    with pytest.raises(ConfigurationError) as caught:
        machine.install()
    message = str(caught.value)
    assert message.startswith("lock.txt: pip could not install it (No matching distribution")
    assert "\n" not in message
    log_file = Path(message.rpartition("full log: ")[2])
    assert "No matching distribution" in log_file.read_text()
    assert machine.environment().pending()


def test_a_failure_before_anything_was_written_keeps_what_is_there(machine: Machine) -> None:
    machine.install()
    machine.lock.write_text(f"{NAME}==9.0\n")
    with pytest.raises(ConfigurationError):
        machine.install()
    assert machine.installed == "1.0"


def test_what_the_configured_index_lacks_comes_from_the_fallback(
    tmp_path: Path, empty_environment: Path
) -> None:
    index = tmp_path / "fallback"
    project = index / NAME.replace("_", "-")
    project.mkdir(parents=True)
    write_wheel(project, "1.0")
    wheel = f"{NAME}-1.0-py3-none-any.whl"
    digest = hashlib.sha256((project / wheel).read_bytes()).hexdigest()
    (project / "index.html").write_text(
        f"<!DOCTYPE html><html><body><a href='{wheel}#sha256={digest}'>{wheel}</a></body></html>"
    )
    machine = Machine(tmp_path, empty_environment, fallback_index=index.as_uri())
    machine.install()
    assert machine.installed == "1.0"
    assert "not on the configured index, asking file:" in machine.output.getvalue()


def test_a_larger_lock_also_counts_for_the_smaller_ones_it_covers(
    machine: Machine, tmp_path: Path
) -> None:
    smaller = tmp_path / "smaller.txt"
    smaller.write_text(f"{NAME}==1.0\n")
    machine.install(covers=(smaller,))
    step = InstallStep("smaller", smaller, ("-r", str(smaller)))
    environment = Environment(machine.environment().folder, [step], machine.logs)
    assert environment.pending() == []
    smaller.write_text(f"{NAME}==2.0\n")
    assert environment.pending() == [step]


def test_an_environment_that_was_moved_is_made_again(machine: Machine, tmp_path: Path) -> None:
    environment = machine.install()
    environment.folder.rename(tmp_path / "moved")
    step = InstallStep("packages", machine.lock, ())
    assert Environment(tmp_path / "moved", [step], machine.logs).pending() == [step]
