"""The counters of the flight recorder in Prometheus' text format."""

import urllib.request

from jaxcomm import recorder
from jaxcomm.recorder import _prometheus

PLACE = 'modèle "a".py:1'
FOUND = _prometheus.Stats(
    (
        _prometheus.Counters("psum", PLACE, "ring", (0, 1), 3, 1, 64, 2.0, 0.5),
        _prometheus.Counters("psum", PLACE, "direct", (2, 3), 4, 0, 32, 1.0, 0.25),
        _prometheus.Counters("psum", PLACE, "ring", (0, 1, 2), 1, 0, 8, 0.5, 0.0),
    ),
    (6, 7),
    5,
)


def values(text):
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_groups_of_equal_size_are_added():
    """They have the same labels, which may occur once."""
    found = values(_prometheus.text(FOUND, 9))
    for name, both, alone in (
        ("calls", 7, 1), ("failed", 1, 0), ("bytes", 96, 8), ("seconds", 3, 0.5), ("waiting_seconds", 0.75, 0)
    ):  # fmt: skip
        for size, value in ((2, both), (3, alone)):
            labels = f'process="9",op="psum",site="modèle \\"a\\".py:1",group_size="{size}"'
            assert float(found[f"jaxcomm_{name}_total{{{labels}}}"]) == value
    assert found['jaxcomm_late_ranks{process="9"}'] == "2"
    assert found['jaxcomm_rejected_messages_total{process="9"}'] == "5"
    assert len(found) == 5 * 2 + 2


def test_the_page_is_whole(monkeypatch):
    """Its length counts bytes, of which some letters have several."""
    monkeypatch.setattr(_prometheus, "stats", lambda: FOUND)
    with urllib.request.urlopen(f"http://127.0.0.1:{recorder.serve()}/metrics", timeout=60) as page:
        assert page.read().decode() == _prometheus.text(FOUND, 0)
