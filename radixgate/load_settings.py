"""Settings from flags and environment, and one line for whatever is wrong with them."""

from __future__ import annotations

import logging

from pydantic import ValidationError
from pydantic_settings import SettingsError

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings

_OUR_LOGGERS = ("cache_router", "engine_workers", "gateway", "radixgate")


def load_settings(**flags: object) -> Settings:
    """Build the settings; a flag that is not None wins over the environment.

    Raises:
        ConfigurationError: Names the first setting that is wrong, as it was given.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]  # pydantic checks them, for one line
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = str(first["loc"][0]).lower()
        name = f"--{field.replace('_', '-')}" if field in given else f"RADIXGATE_{field.upper()}"
        # A key that is wrong is still a key.
        value = "" if "key" in field else f" (it is {str(first['input'])[:100]!r})"
        raise ConfigurationError(name, f"{first['msg']}{value}") from error
    except SettingsError as error:
        raise ConfigurationError("RADIXGATE_*", str(error)) from error


def configure_logging(settings: Settings) -> None:
    """Log our own messages to stderr from the level that is set, and others' warnings.

    Libraries stay at warnings whatever the level is: what they write below that may hold bodies and
    headers, that is, prompts and keys.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(settings.log_level.upper())
