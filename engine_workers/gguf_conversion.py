"""Turn a GGUF file into the safetensors and tokenizer files that vLLM loads.

Runs inside the engine's Python, which has transformers; the gateway's has not. Each line on stdout
is one finished stage, so that the caller can show how far it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

STAGES = ("loading the libraries", "reading the tokenizer", "unpacking the weights", "writing")
"""What `convert` does, in order; one line each on stdout as it begins."""


def convert(gguf_file: Path, folder: Path) -> None:
    """Write `folder` with float32 weights, tokenizer and chat template.

    float32 because a CPU engine answers wrongly in bfloat16, and because unpacked 4-bit weights
    should not be rounded a second time.

    Args:
        gguf_file: The checkpoint; its folder must be readable.
        folder: Where to write; made if it is missing.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: transformers cannot read the checkpoint.
    """
    _announce(0)
    import torch  # type: ignore[import-not-found]  # only the engine has it
    from transformers import (  # type: ignore[import-not-found]  # only the engine has it
        AutoModelForCausalLM,
        AutoTokenizer,
        GgufConfig,
    )

    _announce(1)
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    _announce(2)
    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    _announce(3)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _announce(stage: int) -> None:
    sys.stdout.write(f"stage {stage + 1}/{len(STAGES)} {STAGES[stage]}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
