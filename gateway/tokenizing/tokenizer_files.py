"""A Hugging Face model folder: which of its files decide token ids, and what they say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_router.errors import TokenizerError

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
"""Special tokens that every tokenizer class of the engine's library may have."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Files of another tokenizer that the engine prefers, of a processor whose own chat template it
# prefers, of an encoder whose settings change special tokens.
_FOREIGN_FILES = (
    "tekken.json",
    "tokenizer.model.v*",
    "sentence_*_config.json",
)
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "chat_template.json")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a model folder says about its tokenizer, merged as the engine's library merges it."""

    folder: Path
    backend: Mapping[str, Any]
    """`tokenizer.json`."""
    config: Mapping[str, Any]
    """`tokenizer_config.json`, and `special_tokens_map.json` where that still counts."""
    model_config: Mapping[str, Any]
    """`config.json`."""
    templates: Mapping[str, str]
    """Chat templates by name; a single one is `default`."""

    @property
    def special_tokens(self) -> dict[str, str]:
        """Texts of the named special tokens that are set, as a chat template may read them."""
        extra = self.config.get("extra_special_tokens")
        named: dict[str, Any] = dict(extra) if isinstance(extra, dict) else {}
        named.update(
            {
                name: value
                for name, value in self.config.items()
                if name in NAMED_SPECIAL_TOKENS
                or (name.endswith("_token") and not isinstance(value, bool | int | float))
            }
        )
        return {name: token_text(name, value) for name, value in named.items() if value is not None}

    @property
    def unnamed_special_tokens(self) -> list[str]:
        """Texts of special tokens that only stand in a list."""
        tokens = self.config.get("extra_special_tokens")
        if not isinstance(tokens, list):
            tokens = self.config.get("additional_special_tokens") or []
        return [token_text("extra_special_tokens", token) for token in tokens]


def token_text(name: str, value: object) -> str:
    """Read a special token's text from either form in which configurations write it.

    Raises:
        TokenizerError: Neither a text nor a saved token.
    """
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        value = value.get("content")
    if not isinstance(value, str):
        raise TokenizerError(f"tokenizer_config.json: `{name}` is not a token")
    return value


def find_model_folder(root: str, hub_cache: Path | None) -> Path | None:
    """Find where the model `root` lies: a folder, or a hub id that `hub_cache` holds.

    Nothing is downloaded. Of a hub id the revision `main` is taken, else the only one there.
    """
    folder = Path(root)
    try:
        if folder.is_dir():
            return folder
    except (OSError, ValueError):
        # Too long for a path, not a path at all, or below a folder that is not ours to enter:
        # workers say where their model is, and that may be anything.
        return None
    if hub_cache is None or not _HUB_ID.fullmatch(root):
        return None
    repository = hub_cache / f"models--{root.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        revisions = sorted((repository / "snapshots").glob("*"))
        if len(revisions) != 1:
            return None
        revision = revisions[0].name
    snapshot = repository / "snapshots" / revision
    return snapshot if re.fullmatch(r"[\w.-]+", revision) and snapshot.is_dir() else None


def read_tokenizer_files(folder: Path, chat_template: Path | None) -> TokenizerFiles:
    """Read the files of `folder`; a `chat_template` file takes the place of its templates.

    Raises:
        TokenizerError: A file is missing or cannot be read, or there are files that make the
            engine tokenize or render with something other than these.
    """
    if not (folder / "tokenizer.json").is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json")
    foreign = [path.name for pattern in _FOREIGN_FILES for path in folder.glob(pattern)]
    if foreign:
        raise TokenizerError(f"{folder}: {foreign[0]} may change what the engine tokenizes with")
    backend = _read_json(folder / "tokenizer.json")
    config = dict(_read_json_or_empty(folder / "tokenizer_config.json"))
    if "added_tokens_decoder" not in config:
        # The map of older folders: it counts, and wins, only where that key is missing.
        config.update(
            {
                name: {"__type": "AddedToken", **value} if _is_token(value) else value
                for name, value in _read_json_or_empty(folder / "special_tokens_map.json").items()
            }
        )
        _check_added_tokens_file(folder, backend)
    if chat_template is not None:
        templates = {"default": _read_text(chat_template)}
    else:
        processors = [name for name in _PROCESSOR_FILES if (folder / name).exists()]
        if processors:
            raise TokenizerError(
                f"{folder}: {processors[0]} may bring a chat template that the engine prefers"
            )
        templates = _read_templates(folder, config)
    if not templates:
        raise TokenizerError(f"{folder} has no Jinja chat template")
    return TokenizerFiles(
        folder, backend, config, _read_json_or_empty(folder / "config.json"), templates
    )


def added_tokens(backend: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Read the added tokens of a `tokenizer.json`: objects with `id`, `content` and flags.

    Raises:
        TokenizerError: They are malformed.
    """
    tokens = backend.get("added_tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        raise TokenizerError("tokenizer.json: `added_tokens` is malformed")
    return tokens


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Collect chat templates: files win over those in the configuration."""
    templates: dict[str, str] = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(folder / "chat_template.jinja")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.name.removesuffix(".jinja")] = _read_text(path)
    if templates:
        return templates
    configured = config.get("chat_template")
    if isinstance(configured, str):
        return {"default": configured}
    if isinstance(configured, list):
        configured = {
            entry.get("name"): entry.get("template")
            for entry in configured
            if isinstance(entry, dict)
        }
    if not isinstance(configured, dict):
        return {}
    if not all(isinstance(text, str) for pair in configured.items() for text in pair):
        raise TokenizerError(f"{folder}/tokenizer_config.json: `chat_template` is malformed")
    return configured


def _check_added_tokens_file(folder: Path, backend: Mapping[str, Any]) -> None:
    legacy = _read_json_or_empty(folder / "added_tokens.json")
    added = {token.get("content"): token.get("id") for token in added_tokens(backend)}
    if any(added.get(text) != token_id for text, token_id in legacy.items()):
        raise TokenizerError(f"{folder}: added_tokens.json has tokens that tokenizer.json has not")


def _is_token(value: object) -> bool:
    return isinstance(value, dict) and "content" in value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value


def _read_json_or_empty(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}
