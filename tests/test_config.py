"""Environment variables: read once, and refused where they make no sense."""

import pytest

from jaxcomm._config import Config, config

read = config.__wrapped__  # what is behind the cache


def test_defaults_and_values(monkeypatch):
    monkeypatch.delenv("JAXCOMM_TIMEOUT_S", raising=False)
    monkeypatch.delenv("JAXCOMM_CALIBRATION", raising=False)
    assert read() == Config(timeout_s=30)
    monkeypatch.setenv("JAXCOMM_TIMEOUT_S", "2.5")
    assert read() == Config(timeout_s=2.5)


def test_read_once(monkeypatch):
    first = config()
    monkeypatch.setenv("JAXCOMM_TIMEOUT_S", "garbage")
    assert config() is first


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "many", "²", "99999999999"])
def test_max_sms_is_a_positive_integer(text, monkeypatch):
    monkeypatch.setenv("JAXCOMM_MAX_SMS", "8")
    assert read().max_sms == 8
    monkeypatch.setenv("JAXCOMM_MAX_SMS", text)
    with pytest.raises(ValueError, match="JAXCOMM_MAX_SMS must be a positive integer"):
        read()


def test_windows_are_asked_for(monkeypatch):
    monkeypatch.delenv("JAXCOMM_WINDOWS", raising=False)
    assert not read().windows
    monkeypatch.setenv("JAXCOMM_WINDOWS", "1")
    assert read().windows
    monkeypatch.setenv("JAXCOMM_WINDOWS", "yes")
    with pytest.raises(ValueError, match="JAXCOMM_WINDOWS must be 0 or 1"):
        read()


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "inf", "nan", "1 s"])
def test_garbage_is_refused(text, monkeypatch):
    monkeypatch.setenv("JAXCOMM_TIMEOUT_S", text)
    with pytest.raises(ValueError) as error:
        read()
    assert str(error.value) == f"JAXCOMM_TIMEOUT_S must be a positive number of seconds, got {text!r}"
