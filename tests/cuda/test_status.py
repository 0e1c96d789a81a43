"""docs/development/gpu-status.md agrees with the records, and claims nothing that no test shows."""

import pathlib
import re

import bring_up
import pytest
import status

FOLDER = pathlib.Path(__file__).parent


def test_the_page_matches_the_records():
    """`make gpu-status` writes it."""
    assert status.PAGE.read_text() == status.page(*status.stored())


def test_level_1_names_tests_that_run():
    """Each test exists. A row says "emulated" only if one of its programs contains the emulated kernels."""
    cmake = (FOLDER / "CMakeLists.txt").read_text()
    loop = re.search(r"foreach\(name ([a-z_ ]+)\)\n[^\n]*\n *target_compile_definitions\([^)]*\$\{emulation\}", cmake)
    emulated = set(loop[1].split())
    sources = re.search(r"set_source_files_properties\(([^)]*?)PROPERTIES COMPILE_DEFINITIONS \$\{emulation\}", cmake)
    emulated |= {name[5:-3] for name in sources[1].split()}
    assert len(emulated) > 12
    for row in status.FEATURES:
        assert bool(row.how) == bool(row.tests), row.name
        for test in row.tests:
            assert (FOLDER / f"test_{test if test.endswith('.py') else test + '.cc'}").exists(), test
        if "emulated" in row.how:
            assert emulated & set(row.tests), row.name


def test_parts_and_rungs_exist():
    rungs = {rung for row in status.FEATURES for rung in row.rungs}
    assert rungs == set(bring_up.RUNGS)


def test_nothing_is_claimed_without_a_record():
    text = status.page({}, {})
    assert "passed" not in text and "failed at" not in text
    assert "Nothing has run on a GPU yet" in text
    record = {"commit": "0123456789abc", "device": "a GPU", "driver": "580", "cuda": "13.0"}
    tests = {"JAX, 2 ranks": True, "JAX, 4 ranks": True}
    between = "| inside JAX, between processes | no; ranks are threads, on fakes |"
    assert f"{between} passed at 012345678 |  |" in status.page({"ranks": record | {"tests": tests}}, {})
    tests["JAX, 4 ranks"] = False
    assert f"{between} failed at 012345678 |  |" in status.page({"ranks": record | {"tests": tests}}, {})
    del tests["JAX, 4 ranks"]
    assert f"{between}  |  |" in status.page({"ranks": record | {"tests": tests}}, {})
    rung = {"processes": record | {"tests": {"processes": True}}}
    text = status.page({}, rung)
    assert f"{between}  | processes passed at 012345678 |" in text
    assert "Nothing has run on a GPU yet" not in text


@pytest.mark.parametrize("records", [({"smoke": {"platform": "cpu"}}, {}), ({}, {"nodes": {"platform": "cpu"}})])
def test_rehearsals_are_not_recorded(records):
    with pytest.raises(ValueError, match="rehearsal"):
        status.page(*records)
