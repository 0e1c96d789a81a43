"""The counters of the flight recorder in Prometheus' text format."""

import urllib.request

import pytest

from jaxcomm import _core, recorder
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


def test_histograms_of_transfers():
    """Each bucket counts all requests that took at most its limit."""
    counters = {"leases": 2, "tcp_sent_bytes": 64, "open_us": 10, "read_us": 5_000_003, "read_wait_us": 2_500_000}
    traffic = {"p": {"tcp_sent_bytes": 60}, "q": {"tcp_sent_bytes": 4}}
    histograms = {"open": [0, 1, 2, 0], "read": [3, 0, 0, 1]}
    transfers = tuple(_prometheus.Transfers(name, counters, traffic, histograms, []) for name in "ab")
    found = values(_prometheus.text(_prometheus.Stats((), (), 0, transfers), 9))
    for endpoint in "ab":
        labels = f'process="9",endpoint="{endpoint}"'
        assert found.pop(f"jaxcomm_transfer_leases{{{labels}}}") == "2"
        assert found.pop(f"jaxcomm_transfer_tcp_sent_bytes_total{{{labels}}}") == "64"
        assert found.pop(f"jaxcomm_transfer_read_wait_seconds_total{{{labels}}}") == "2.5"
        for peer, count in (("p", "60"), ("q", "4")):
            assert found.pop(f'jaxcomm_transfer_peer_tcp_sent_bytes_total{{{labels},peer="{peer}"}}') == count
        for name, below, total_s in (("open", [0, 1, 3, 3], 1e-5), ("read", [3, 3, 3, 4], 5.000003)):
            metric = f"jaxcomm_transfer_{name}_seconds"
            for limit, count in zip(("1e-06", "2e-06", "4e-06", "+Inf"), below, strict=True):
                assert found.pop(f'{metric}_bucket{{{labels},le="{limit}"}}') == str(count)
            assert float(found.pop(f"{metric}_sum{{{labels}}}")) == total_s
            assert found.pop(f"{metric}_count{{{labels}}}") == str(below[-1])
    assert set(found) == {'jaxcomm_late_ranks{process="9"}', 'jaxcomm_rejected_messages_total{process="9"}'}


def test_the_page_is_whole(monkeypatch):
    """Its length counts bytes, of which some letters have several."""
    monkeypatch.setattr(_prometheus, "stats", lambda: FOUND)
    with urllib.request.urlopen(f"http://127.0.0.1:{recorder.serve()}/metrics", timeout=60) as page:
        assert page.read().decode() == _prometheus.text(FOUND, 0)
    for port in (65536, -1, 0.5, "80"):
        with pytest.raises(ValueError, match="serve: port must be an integer from 0 to 65535"):
            recorder.serve(port)


def test_a_ring_that_somebody_has_removed(tmp_path, monkeypatch):
    """The thread that writes the counters goes on, also without the folder: it may come back."""
    ring = tmp_path / "folder" / "process-3-1-1.ring"
    monkeypatch.setattr(_core.recorder, "path", lambda: str(ring))
    writer = _prometheus.Writer(ring)
    writer.write()
    ring.parent.mkdir()
    writer.write()
    file = ring.with_name(f"{ring.name}.prom")
    assert set(values(file.read_text())) >= {'jaxcomm_late_ranks{process="3"}'}
    file.unlink()
    writer.write_if_due()
    assert not file.exists()
    writer._due = 0
    for written in (True, False):
        writer.write_if_due()
        assert file.exists() == written
        file.unlink(missing_ok=True)
