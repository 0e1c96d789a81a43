"""docs/gpu-status.md says what the records say, and no more."""

import status


def test_page_is_that_of_the_records():
    assert status.PAGE.read_text() == status.page(status.load("ring1.json"), status.load("test-gpu.json"))


def test_nothing_is_claimed_without_a_record():
    tests = dict.fromkeys(["native test_cuda_failures", "thread test_cuda_failures"], True)
    assert "passed" not in status.page({}, {})
    assert "| timeouts and reports | passed (0123456) |" in status.page({"commit": "0123456", "tests": tests}, {})
    tests["thread test_cuda_failures"] = False
    assert "| timeouts and reports | FAILED (0123456) |" in status.page({"commit": "0123456", "tests": tests}, {})
    del tests["thread test_cuda_failures"]
    assert "| timeouts and reports |  |" in status.page({"commit": "0123456", "tests": tests}, {})
