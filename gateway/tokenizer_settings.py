"""Checking what was configured about tokenizing before anything is served with it."""

from __future__ import annotations

from cache_router.errors import ConfigurationError, TokenizerError
from cache_router.settings import Settings
from gateway.tokenizing.chat_template import ChatTemplate
from gateway.tokenizing.model_tokenizer import ModelTokenizer
from gateway.tokenizing.tokenizer_files import find_model_folder


def check_tokenizer_settings(settings: Settings) -> None:
    """Refuse a tokenizer or a template that was named and cannot be used.

    What is only discovered may be unusable: its model's engine tokenizes then. What somebody
    asked for by name may not.

    Raises:
        ConfigurationError: There is no such folder or file, or it is not usable.
    """
    if settings.chat_template is not None:
        try:
            ChatTemplate(settings.chat_template.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, TokenizerError) as error:
            raise ConfigurationError(
                "RADIXGATE_CHAT_TEMPLATE", f"{settings.chat_template} cannot be used: {error}"
            ) from error
    if settings.tokenizer is None:
        return
    name = str(settings.tokenizer)
    folder = find_model_folder(name, settings.hub_cache_folder)
    if folder is None:
        raise ConfigurationError(
            "RADIXGATE_TOKENIZER",
            f"{name} is neither a folder here nor in the hub cache {settings.hub_cache}",
        )
    try:
        ModelTokenizer.load(folder, settings.chat_template)
    except TokenizerError as error:
        raise ConfigurationError("RADIXGATE_TOKENIZER", f"{folder}: {error}") from error
