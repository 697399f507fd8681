"""Is this a model folder that vLLM can load, and how large is it.

Standard library only, because the bootstrap checks what it converted.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_router.errors import ConfigurationError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_MAX_HEADER_BYTES = 100_000_000
# What reading JSON of another form than expected ends in; some files are somebody else's idea.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What an engine is given to load."""

    argument: str
    """An absolute folder, or a hub id, as vLLM's `--model` takes it."""
    served_name: str
    """What clients write in `model`."""
    num_parameters: int | None
    """None if the weights are not here to be counted."""

    @property
    def is_local(self) -> bool:
        """Whether nothing has to be downloaded."""
        return Path(self.argument).is_absolute()


def resolve_model(model: str) -> ModelSource:
    """Understand `MODEL`: a Hugging Face folder, which is checked, or a hub id, which vLLM loads.

    Raises:
        ConfigurationError: It is neither, or the folder lacks something.
    """
    try:
        folder = Path(model).expanduser()
        is_there = folder.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no access, no such user, a null byte
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            "RADIXGATE_MODEL", f"{model[:200]} cannot be looked for ({reason}); give a model folder"
        ) from error
    if is_there:
        # Not resolved: clients write the name that the folder was given by, not a link's target.
        folder = Path(os.path.abspath(folder))
        return ModelSource(str(folder), folder.name, check_model_folder(folder))
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_like_path or not _HUB_ID.fullmatch(model):
        raise ConfigurationError(
            "RADIXGATE_MODEL",
            f"there is no folder {model}; give a Hugging Face model folder or a hub id",
        )
    return ModelSource(model, model, None)


def check_model_folder(folder: Path) -> int | None:
    """Check that configuration, tokenizer and weights are there and whole.

    Returns:
        Number of parameters, None if the weights are not in safetensors files.

    Raises:
        ConfigurationError: Names the first file that is missing or broken.
    """
    if not folder.is_dir():
        raise ConfigurationError("RADIXGATE_MODEL", f"{folder} is a file; give the folder it is in")
    config = _read_json(folder, "config.json")
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConfigurationError(
            "RADIXGATE_MODEL", f"{folder}/config.json names no `architectures`"
        )
    slow = (folder / "tokenizer.model").is_file()
    slow |= (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    if not slow:
        _read_json(folder, "tokenizer.json")
    if (folder / _INDEX).is_file():
        return sum(count_parameters(folder / name) for name in _shards(folder))
    safetensors = sorted(folder.glob("*.safetensors"))
    if safetensors:
        return sum(map(count_parameters, safetensors))
    if any(folder.glob("*.bin")):
        return None
    raise ConfigurationError(
        "RADIXGATE_MODEL",
        f"{folder} has no weights: model.safetensors is missing; download them again",
    )


def _shards(folder: Path) -> list[str]:
    index = _read_json(folder, _INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigurationError("RADIXGATE_MODEL", f"{folder}/{_INDEX} has no `weight_map`")
    return sorted({str(name) for name in weight_map.values()})


def _read_json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        raise ConfigurationError(
            "RADIXGATE_MODEL", f"{folder} has no {name}; copy it there"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            "RADIXGATE_MODEL", f"{folder}/{name} cannot be read ({error}); download it again"
        ) from error


def count_parameters(file: Path) -> int:
    """Elements of all tensors in a safetensors file.

    Raises:
        ConfigurationError: The file is missing, is not safetensors, or is cut off.
    """
    try:
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            # In a file of another kind these bytes are a huge number; nothing is not valid JSON.
            is_plausible = header_bytes <= _MAX_HEADER_BYTES
            header = json.loads(opened.read(header_bytes) if is_plausible else b"")
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        data_end = max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        num_parameters = int(sum(math.prod(entry["shape"]) for entry in tensors))
        size = file.stat().st_size
    except FileNotFoundError:
        raise ConfigurationError(
            "RADIXGATE_MODEL", f"{file} is missing; download it again"
        ) from None
    except (OSError, *_MALFORMED) as error:
        raise ConfigurationError(
            "RADIXGATE_MODEL", f"{file} is not a safetensors file ({error}); download it again"
        ) from error
    if size != 8 + header_bytes + data_end:
        raise ConfigurationError(
            "RADIXGATE_MODEL",
            f"{file} has {size} bytes and should have {8 + header_bytes + data_end}; "
            "download it again",
        )
    return num_parameters
