"""Environment variables: read once, and checked."""

import dataclasses
import pathlib
import re

import pytest

from jaxcomm._config import ALL, EACH, config, table

read = config.__wrapped__  # the function without its cache


VARIABLES = {
    "JAXCOMM_TIMEOUT_S": ("0.25", "timeout_s", 0.25, 600.0),
    "JAXCOMM_WARN_S": ("2", "warn_s", 2.0, 30.0),
    "JAXCOMM_NODE_ID": ("n", "node_id", "n", None),
    "JAXCOMM_SINGLE_COPY": ("0", "single_copy", False, True),
    "JAXCOMM_UCX_LIBRARY": ("/u", "ucx_library", "/u", None),
    "JAXCOMM_NETWORK_DEVICES": ("eth1", "network_devices", "eth1", None),
    "JAXCOMM_MAX_SMS": ("2147483647", "max_sms", 2**31 - 1, 32),
    "JAXCOMM_SYMMETRIC_BUFFERS": ("1", "symmetric_buffers", True, False),
    "JAXCOMM_BULK_COPY": ("1", "bulk_copy", True, False),
    "JAXCOMM_ALGORITHM": ("xla", "algorithm", "xla", None),
    "JAXCOMM_CALIBRATION": ("/c", "calibration", "/c", None),
    "JAXCOMM_RECORDER": ("/r", "recorder", "/r", None),
    "JAXCOMM_RECORDER_CALLS": ("9", "recorder_calls", 9, 4096),
}


def test_each_variable_sets_its_field(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    expected = {field: default for _, field, _, default in VARIABLES.values()}
    for variable, (text, field, value, _) in VARIABLES.items():
        assert dataclasses.asdict(read()) == expected
        monkeypatch.setenv(variable, text)
        expected[field] = value
    assert dataclasses.asdict(read()) == expected
    monkeypatch.setenv("JAXCOMM_ALGORITHM", "")
    assert read().algorithm is None


def test_the_page_has_the_table():
    """docs/configuration.md has each variable, its default, and who must agree. No other variable is read."""
    root = pathlib.Path(__file__).parents[1]
    assert table() in (root / "docs" / "configuration.md").read_text()
    rows = re.findall(r"^\| `(JAXCOMM_\w+)` \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table(), flags=re.MULTILINE)
    shown = {None: "not set", True: "1", False: "0"}
    assert [(name, default) for name, default, _, _ in rows] == [
        (name, shown.get(default, f"{default:g}" if isinstance(default, float) else str(default)))
        for name, (_, _, _, default) in VARIABLES.items()
    ]
    alike = {name for name, _, who, _ in rows if who == ALL}
    assert alike == {"JAXCOMM_MAX_SMS", "JAXCOMM_SYMMETRIC_BUFFERS", "JAXCOMM_ALGORITHM"}
    assert {who for _, _, who, _ in rows} == {ALL, EACH}
    for path in (root / "jaxcomm").rglob("*.py"):
        if path.name != "_config.py":
            assert not re.search(r"environ\W.*JAXCOMM_", path.read_text()), path


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("JAXCOMM_TIMOUT_S", "did you mean JAXCOMM_TIMEOUT_S?"),
        ("JAXCOMM_MAX_SM", "did you mean JAXCOMM_MAX_SMS?"),
        ("JAXCOMM_COLOR_OF_LOGS", "docs/configuration.md lists the settings"),
        *((name, None) for name in ("JAXCOMM_BENCHMARK_HOST", "JAXCOMM_CUDA_ARCHITECTURES", "JAXCOMM_TEST_X")),
        ("JAXCOMMA", None),
    ],
)
def test_unknown_variables_are_reported_with_the_nearest_name(monkeypatch, capsys, name, remedy):
    monkeypatch.setenv(name, "1")
    read()
    line = f"warning: jaxcomm: the environment variable {name} is unknown: {remedy}\n"
    assert capsys.readouterr().err == (line if remedy else "")


SECONDS, SMS = "a positive number of seconds up to 1e+09", "a positive integer"
REFUSED = {
    "JAXCOMM_TIMEOUT_S": (SECONDS, ["", "soon", "0", "-1", "inf", "1e10", "nan", "1 s"]),
    "JAXCOMM_MAX_SMS": (SMS, ["", "0", "-1", "1.5", "many", "²", "2147483648"]),
    "JAXCOMM_SYMMETRIC_BUFFERS": ("0 or 1", ["yes"]),
    "JAXCOMM_ALGORITHM": ("'xla', 'plans', empty or not set", ["ring", "XLA", " xla", "plan"]),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, (_, texts) in REFUSED.items() for text in texts])
def test_garbage_is_refused(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"^{name} must be {re.escape(REFUSED[name][0])}, got .*{re.escape(text)}"):
        read()
