from __future__ import annotations

import logging

import pytest

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from radixgate.load_settings import configure_logging, load_settings


def test_a_flag_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXGATE_PORT", "1234")
    assert load_settings(port=None).port == 1234
    assert load_settings(port=99).port == 99


def test_what_nobody_set_is_not_marked_as_set() -> None:
    assert "route_headers" not in load_settings(host=None).model_fields_set


def test_an_error_does_not_show_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXGATE_KEEP_ALIVE_S", "secret-looking")
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    assert caught.value.setting == "RADIXGATE_KEEP_ALIVE_S"
    assert "\n" not in str(caught.value)


def test_libraries_stay_at_warnings_whatever_our_level_is() -> None:
    before = {name: logging.getLogger(name).level for name in ("", "gateway", "cache_router")}
    try:
        configure_logging(Settings(log_level="debug"))
        assert logging.getLogger("gateway.anything").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("httpcore").isEnabledFor(logging.INFO)
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
