"""docs/development/gpu-status.md agrees with the records, and claims nothing that no record shows."""

import status


def test_the_page_matches_the_records():
    """`make gpu-status` writes it."""
    assert status.PAGE.read_text() == status.page(status.stored())
