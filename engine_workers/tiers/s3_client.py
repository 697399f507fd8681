"""Connecting to S3 or a store that speaks like it, with bounds on time, and its credentials.

The library is used through its blocking calls, on threads of ours: its asynchronous ones finish on
threads of its own, which end the process with SIGABRT if it exits at that moment.
"""

from __future__ import annotations

import configparser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError
from obstore.store import S3Store

from cache_router.errors import ConfigurationError, TierError

if TYPE_CHECKING:  # they exist in the library's stubs only
    from obstore.store import ClientConfig, RetryConfig, S3Config

_MAX_RETRIES = 2
_MAX_CREDENTIALS_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class S3Credentials:
    """An access key and what belongs to it."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class S3Options:
    """Where blocks lie in S3, and how to get there."""

    bucket: str
    prefix: str = "radixgate"
    endpoint: str | None = None
    region: str = "us-east-1"
    credentials: S3Credentials | None = None
    """None leaves it to AWS's own variables and the machine's role."""
    timeout_s: float = 10.0
    concurrency: int = 16


def configured_credentials(
    access_key_id: str | None, secret_access_key: str | None, file: Path | None
) -> S3Credentials | None:
    """Return the credentials that were given, from their file if there is one.

    Raises:
        ConfigurationError: The file cannot be used, or a key was given without its secret.
    """
    if file is not None:
        return _credentials_in(file)
    if (access_key_id is None) != (secret_access_key is None):
        raise ConfigurationError(
            "RADIXGATE_S3_ACCESS_KEY_ID", "goes together with RADIXGATE_S3_SECRET_ACCESS_KEY"
        )
    if access_key_id is None or secret_access_key is None:
        return None
    return S3Credentials(access_key_id, secret_access_key)


def connect(options: S3Options) -> S3Store:
    """Return a client; nothing is sent before it is first used.

    Raises:
        ConfigurationError: Bucket or endpoint cannot be right.
    """
    # Half for the first try, half for all others.
    half = timedelta(seconds=options.timeout_s / 2)
    retries: RetryConfig = {"max_retries": _MAX_RETRIES, "retry_timeout": half}
    client: ClientConfig = {"timeout": half, "connect_timeout": half}
    config: S3Config = {"region": options.region}
    if options.endpoint is not None:
        if not options.endpoint.startswith(("http://", "https://")):
            raise ConfigurationError("RADIXGATE_S3_ENDPOINT", "is no http:// or https:// URL")
        config["endpoint"] = options.endpoint
        client["allow_http"] = options.endpoint.startswith("http://")
    if options.credentials is not None:
        config["access_key_id"] = options.credentials.access_key_id
        config["secret_access_key"] = options.credentials.secret_access_key
        if options.credentials.session_token is not None:
            config["session_token"] = options.credentials.session_token
    try:
        return S3Store(
            options.bucket,
            prefix=options.prefix or None,
            config=config,
            client_options=client,
            retry_config=retries,
        )
    except (BaseError, ValueError) as error:
        raise ConfigurationError("RADIXGATE_S3_BUCKET", _told(error)) from error


@contextmanager
def told_as_tier_error(tier: str) -> Iterator[None]:
    """Give our error for the library's; what is not there stays `FileNotFoundError`.

    Raises:
        TierError: The store is not reachable, too slow, broken, or does not let us in.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        raise TierError(tier, f"{type(error).__name__}: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Cut a library's text down to what went wrong.

    Before that it names the URL, behind it what the store answered, perhaps with the access key.
    """
    return str(error).partition("\n")[0].rpartition(" - ")[2].partition("<")[0][:200]


def _credentials_in(file: Path) -> S3Credentials:
    setting = "RADIXGATE_S3_CREDENTIALS_FILE"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        with file.open(encoding="utf-8") as opened:
            parser.read_string(opened.read(_MAX_CREDENTIALS_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(setting, "cannot be read") from error
    except configparser.Error:
        # Its text quotes the line, which may be a secret.
        raise ConfigurationError(setting, "is not in the format of AWS's credentials") from None
    profile = parser["default"] if parser.has_section("default") else {}
    key, secret = profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")
    if not key or not secret:
        raise ConfigurationError(
            setting, "has no profile `default` with aws_access_key_id and aws_secret_access_key"
        )
    return S3Credentials(key, secret, profile.get("aws_session_token"))
