"""docs/development/gpu-status.md agrees with the records."""

import pytest
import status


def test_the_page_matches_the_records():
    assert status.PAGE.read_text() == status.page(*map(status.load, ("level1.json", "test-gpu.json", "bench-gpu.json")))


def test_nothing_is_claimed_without_a_record():
    tests = dict.fromkeys(["native test_cuda_failures", "thread test_cuda_failures"], True)
    assert "passed" not in status.page({}, {}, {})
    assert "| timeouts and reports | passed (0123456) |" in status.page({"commit": "0123456", "tests": tests}, {}, {})
    tests["thread test_cuda_failures"] = False
    assert "| timeouts and reports | FAILED (0123456) |" in status.page({"commit": "0123456", "tests": tests}, {}, {})
    del tests["thread test_cuda_failures"]
    assert "| timeouts and reports |  |" in status.page({"commit": "0123456", "tests": tests}, {}, {})


def test_measurements_are_listed_with_their_targets():
    machine = {"device": "a GPU", "driver": "580", "cuda": "13.0", "commit": "0123456789abcdef"}
    targets = {
        "met": {"value": 0.95, "target": ">= 0.9", "met": True},
        "missed": {"value": 0.5, "target": ">= 0.9", "met": False},
        "not measured": {"value": None, "target": "<= 5", "met": None},
    }
    text = status.page({}, {}, machine | {"targets": targets})
    assert "| met | >= 0.9 | 0.95 |" in text
    assert "| missed | >= 0.9 | 0.5, not met |" in text
    assert "| not measured | <= 5 |  |" in text
    assert "a GPU, driver 580, CUDA 13.0, commit 012345678." in text


@pytest.mark.parametrize("records", [({}, {"platform": "cpu"}, {}), ({}, {}, {"platform": "cpu"})])
def test_rehearsals_are_not_recorded(records):
    with pytest.raises(ValueError, match="rehearsal"):
        status.page(*records)
