"""docs/development/gpu-status.md agrees with the records, and claims nothing that no record shows."""

import pytest
import status


def test_the_page_matches_the_records():
    """`make gpu-status` writes it."""
    assert status.PAGE.read_text() == status.page(status.stored())


def test_the_page_shows_each_part_and_target():
    record = {"commit": "0123456789abc", "device": "a GPU", "driver": "580", "cuda": "13.0"}
    targets = {
        "speed": {"value": 2.5, "target": ">= 3", "met": False},
        "delay": {"value": None, "target": "<= 5", "met": None},
    }
    timings = record | {"tests": {"LL": True}, "targets": targets}
    text = status.page({"timings": timings, "nodes": record | {"tests": {"nodes": False}}})
    for line in (
        "| `timings` | LL | passed | 012345678 |",
        "| `nodes` | nodes | failed | 012345678 |",
        "| speed | >= 3 | 2.5, not met |",
        "| delay | <= 5 |  |",
        "Machines: a GPU, driver 580, CUDA 13.0.",
    ):
        assert f"\n{line}\n" in text
    assert "Nothing has run" in status.page({}) and "passed" not in status.page({})
    with pytest.raises(ValueError, match="rehearsal"):
        status.page({"smoke": {"platform": "cpu"}})
