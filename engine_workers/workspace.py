"""Where environments, models, sockets and logs lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Workspace:
    """One checkout and what is kept beside its sources; nothing here is created by looking."""

    root: Path

    @classmethod
    def current(cls) -> Workspace:
        """The checkout these sources are in; for an installed wheel, the current folder."""
        checkout = Path(__file__).resolve().parents[1]
        return cls(checkout if (checkout / "requirements").is_dir() else Path.cwd())

    @property
    def requirements(self) -> Path:
        """Lock files."""
        return self.root / "requirements"

    @property
    def gateway_environment(self) -> Path:
        """The gateway's and the tests' virtual environment."""
        return self.root / ".venv"

    @property
    def engine_environment(self) -> Path:
        """The CPU engine's virtual environment."""
        return self.root / ".venv-engine"

    @property
    def state(self) -> Path:
        """Everything that is made at run time."""
        return self.root / ".radixgate"

    @property
    def logs(self) -> Path:
        """One file an engine and one a run of pip."""
        return self.state / "logs"

    @property
    def models(self) -> Path:
        """Converted models, one folder each."""
        return self.state / "models"

    @property
    def cache(self) -> Path:
        """Downloads that are no longer needed once their model is converted."""
        return self.state / "cache"

    @property
    def sockets(self) -> Path:
        """Unix sockets of the KV events."""
        return self.state / "sockets"

    @property
    def runtime_file(self) -> Path:
        """Which Python runs the engines, as the bootstrap chose it."""
        return self.state / "engine.json"
