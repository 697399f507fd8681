"""Tells models apart by what is in their files, so that a node's folder names do not matter."""

from __future__ import annotations

import hashlib
from pathlib import Path

_SAMPLE_BYTES = 64 * 1024
_MAX_SAMPLES = 256
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def model_digest(folder: Path, effective_config: str) -> str:
    """Digest over configuration and weights.

    Of each file of weights, up to 16 MiB are read, at even distances over all of it: two trainings
    of one architecture have files of equal names and sizes, and differ everywhere.

    Args:
        folder: With the model's files.
        effective_config: The configuration as the engine uses it, overrides included.

    Raises:
        OSError: A file cannot be read.
    """
    digest = hashlib.blake2b(effective_config.encode(), digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.name == "config.json":
            digest.update(path.read_bytes())
        elif path.suffix in _WEIGHTS:
            _add_samples(digest, path)
    return digest.hexdigest()


def _add_samples(digest: hashlib.blake2b, path: Path) -> None:
    with path.open("rb") as weights:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        num_samples = min(_MAX_SAMPLES, -(-size // _SAMPLE_BYTES))
        for number in range(num_samples):
            last = max(0, size - _SAMPLE_BYTES)
            weights.seek(last * number // max(1, num_samples - 1))
            digest.update(weights.read(_SAMPLE_BYTES))
