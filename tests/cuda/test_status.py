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

    for name, begin in (("", "only the text of the lowering"), (" in CUDA graphs", ""), (" between nodes", "no; ")):
        (row,) = (row for row in status.FEATURES if row.name.startswith(f"inside JAX{',' if name else ':'}{name}"))
        assert row.how.startswith(begin) and bool(row.how) == bool(begin)
        assert "emulated" not in row.how and "passed" not in row.how
    assert {rung for row in status.FEATURES for rung in row.rungs} == set(bring_up.RUNGS)


def test_only_records_make_claims():
    text = status.page({}, {}, {})
    assert "passed" not in text and "failed at" not in text and "Nothing has run on a GPU yet" in text
    record = {"commit": "0123456789abc", "device": "a GPU", "driver": "580", "cuda": "13.0"}
    between = "| inside JAX, between processes | no; ranks are threads, on fakes |"
    for tests, shown in (
        ({"JAX, 2 ranks": True, "JAX, 4 ranks": True}, "passed at 012345678"),
        ({"JAX, 2 ranks": True, "JAX, 4 ranks": False}, "failed at 012345678"),
        ({"JAX, 2 ranks": True}, ""),
    ):
        assert f"{between} {shown} |  |" in status.page(record | {"tests": tests}, {}, {})
    text = status.page({}, {}, {"processes": record | {"tests": {"processes": True}}})
    assert f"{between}  | processes passed at 012345678 |" in text and "Nothing has run on a GPU yet" not in text
    targets = {name: {"value": value, "target": ">= 0.9", "met": met} for name, value, met in (
        ("met", 0.95, True), ("missed", 0.5, False), ("not measured", None, None)
    )}  # fmt: skip
    text = status.page({}, record | {"targets": targets}, {})
    for row in ("| met | >= 0.9 | 0.95 |", "| missed | >= 0.9 | 0.5, not met |", "| not measured | >= 0.9 |  |"):
        assert row in text
    for records in ({"platform": "cpu"}, {}, {}), ({}, {}, {"nodes": {"platform": "cpu"}}):
        with pytest.raises(ValueError, match="rehearsal"):
            status.page(*records)
