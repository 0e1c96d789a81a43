"""goodput(): shares by hand, and the limits of Young's formula."""

import math

import pytest

from jaxcomm.simulate import cli, goodput


def test_the_best_interval_is_the_best():
    options = {"mtbf_s": 1e8, "checkpoint_s": 120.0, "restart_s": 300.0}
    best = goodput(20000, **options)
    others = [goodput(20000, interval_s=best.interval_s * scale, **options).share for scale in (0.5, 0.9, 1.1, 2)]
    assert max(others) < best.share
    assert best.daly_s == pytest.approx(best.interval_s, rel=0.01)


def test_rare_failures_give_young_s_interval():
    """For C much smaller than M, the loss is sqrt(2 C / M)."""
    found = goodput(1, mtbf_s=1e9, checkpoint_s=1, restart_s=0)
    assert found.interval_s == pytest.approx((2e9) ** 0.5, rel=1e-3) and found.young_s == (2e9) ** 0.5
    assert 1 - found.share == pytest.approx((2e-9) ** 0.5, rel=1e-3)
    for mtbf_s in (1e5, 1e12, 1e18):  # where digits cancel
        found = goodput(1, mtbf_s=mtbf_s, checkpoint_s=1e-3, restart_s=0)
        assert found.interval_s == pytest.approx((2e-3 * mtbf_s) ** 0.5, rel=1e-4)


def test_failures_during_every_checkpoint_leave_nothing():
    assert goodput(10**6, mtbf_s=1e6, checkpoint_s=100, restart_s=1000).share < 1e-6
    assert goodput(10**6, mtbf_s=1e6, checkpoint_s=1e4, restart_s=1000).share == 0


def test_shares_by_hand():
    """M = C = 100 s, R = 0: a piece of 100 s of work and its checkpoint take 100 (e^2 - 1) s."""
    found = goodput(10, mtbf_s=1000, checkpoint_s=100, restart_s=0, interval_s=100)
    assert found.share == found.checkpoint_share == pytest.approx(1 / (math.e**2 - 1))
    text = str(found)
    assert "goodput     15.65% of the time" in text and "checkpoints 15.65% of the time" in text
    assert "failures    68.70% of the time; one every 100 s" in text
    # With R = 100 s, in which failures can come too, e times as much.
    slow = goodput(10, mtbf_s=1000, checkpoint_s=100, restart_s=60, detect_s=40, interval_s=100)
    assert slow.mtbf_s == 100 and slow.share == pytest.approx(found.share / math.e)
    # C = 2 s, M = 4 s: sqrt(2 C M) is 4 s, and sqrt(C / (2 M)) is 1/2.
    found = goodput(1, mtbf_s=4, checkpoint_s=2, restart_s=0)
    assert found.young_s == 4 and found.daly_s == pytest.approx(4 * (1 + 1 / 6 + 1 / 36) - 2)


def test_the_command(capsys):
    command = ["goodput", "--ranks", "16384", "--mtbf", "5y", "--checkpoint", "1min", "--restart", "9s"]
    assert cli.main([*command, "--detect", "0.01d"]) == 0
    expected = goodput(16384, mtbf_s=5 * 365.25 * 86400, checkpoint_s=60, restart_s=9, detect_s=864)
    assert capsys.readouterr().out == f"{expected}\n" and "none is measured" in str(expected)
    assert cli.main([*command, "--interval", "1h"]) == 0
    assert "every 3600 s of work" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--mtbf", "5 parsec"], "--mtbf: got '5 parsec', expected a number with one of the units s, min, h, d, y"),
        (["--mtbf", "0s"], "mtbf_s must be more than 0, got 0"),
        (["--ranks", "0"], "ranks must be at least 1, got 0"),
        (["--checkpoint", "0s"], "checkpoint_s must be more than 0"),
    ],
)
def test_bad_input(changed, message, capsys):
    command = ["goodput", "--ranks", "8", "--mtbf", "1y", "--checkpoint", "1s", "--restart", "1s"]
    assert cli.main([*command, *changed]) == 2
    assert message in capsys.readouterr().err
