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
    emulated = {f"test_cuda_{name}" for name in loop[1].split()}
    sources = re.search(r"set_source_files_properties\(([^)]*?)PROPERTIES COMPILE_DEFINITIONS \$\{emulation\}", cmake)
    emulated |= {f"test_cuda_{name[5:-3]}" for name in sources[1].split()}
    assert len(emulated) > 12
    for row in status.FEATURES:
        assert bool(row.how) == bool(row.tests), row.name
        for test in row.tests:
            file = test if test.endswith(".py") else f"{test.replace('test_cuda_', 'test_')}.cc"
            assert (FOLDER / file).exists(), test
        if "emulated" in row.how:
            assert emulated & set(row.tests), row.name


@pytest.mark.parametrize(
    ("name", "begin"),
    [
        ("inside JAX:", "only the text of the lowering"),
        ("inside JAX, in CUDA graphs", ""),
        ("inside JAX, between processes", "no; "),
        ("inside JAX, between nodes", "no; "),
    ],
)
def test_what_never_ran_is_not_emulated(name, begin):
    (row,) = (row for row in status.FEATURES if row.name.startswith(name))
    assert row.how.startswith(begin) and bool(row.how) == bool(begin)
    assert "emulated" not in row.how and "passed" not in row.how


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


def test_parts_of_one_feature_in_two_records():
    machine = {"device": "a GPU", "driver": "580", "cuda": "13.0"}
    records = {
        "smoke": machine | {"commit": "a" * 40, "tests": {"launch and LL of 8 bytes": True}},
        "kernels": machine | {"commit": "b" * 40, "tests": {"ll": True}},
    }
    row = "| LL messages: four collectives, all types, sizes and strides | emulated |"
    assert f"{row} passed at {'a' * 9}, {'b' * 9} |" in status.page(records, {})
    assert f"{row}  |" in status.page({"smoke": records["smoke"]}, {})


def test_measurements_are_listed_with_their_targets():
    machine = {"device": "a GPU", "driver": "580", "cuda": "13.0", "commit": "0123456789abcdef"}
    targets = {
        "met": {"value": 0.95, "target": ">= 0.9", "met": True},
        "missed": {"value": 0.5, "target": ">= 0.9", "met": False},
        "not measured": {"value": None, "target": "<= 5", "met": None},
    }
    text = status.page({"timings": machine | {"targets": targets}}, {})
    assert "| met | >= 0.9 | 0.95 |" in text
    assert "| missed | >= 0.9 | 0.5, not met |" in text
    assert "| not measured | <= 5 |  |" in text
    assert "a GPU, driver 580, CUDA 13.0, commit 012345678." in text


@pytest.mark.parametrize("records", [({"smoke": {"platform": "cpu"}}, {}), ({}, {"nodes": {"platform": "cpu"}})])
def test_rehearsals_are_not_recorded(records):
    with pytest.raises(ValueError, match="rehearsal"):
        status.page(*records)
