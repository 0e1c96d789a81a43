"""The parts of the full size of tests: every test is in one of them, and they take about the same time."""

import collections

import pytest
import shards

NAMES = [f"tests/test_{number % 50}.py::test_{number}" for number in range(4000)]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_first_part_has_an_eighth_of_the_tests_of_another(parts):
    sizes = collections.Counter(shards.part(name, False, parts) for name in NAMES)
    assert sorted(sizes) == list(range(1, parts + 1))
    expected = [len(NAMES) / (8 * parts - 7) * (1 if part == 1 else 8) for part in sorted(sizes)]
    assert [sizes[part] for part in sorted(sizes)] == pytest.approx(expected, rel=0.2)
