"""Random offers, pulls, cancels, revocations, stops and kills, with every byte checked (chaos.py)."""

import chaos
import pytest


@pytest.mark.parametrize("rounds", [400, pytest.param(100_000, marks=pytest.mark.stress)])
def test_no_wrong_byte_and_no_leaked_page(rounds):
    results = chaos.run(rounds)
    assert results.total() - results["kills"] == rounds
    assert results["wait"] > rounds // 4 and results["kills"] > 0
