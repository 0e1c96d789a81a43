"""The tables of CONTRIBUTING.md against the files and folders that exist."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
NOT_LISTED = {"__init__.py", "__main__.py", "py.typed", "CMakeLists.txt"}


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [pathlib.PurePath(name) for name in listed.split("\0") if (ROOT / name).is_file()]


def listed_in(title):
    """Names of the first column of the table with this heading."""
    rows = re.search(rf"^\| {re.escape(title)} \|.*\n\|---.*\n((?:\|.*\n)+)", CONTRIBUTING, re.M)[1]
    names = [name for row in rows.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(names) == len(set(names)), f"the table of {title} lists a name twice"
    return set(names)


def children(folder):
    """Names in a folder, those of folders with a slash."""
    inside = [path.relative_to(folder) for path in tracked() if path.is_relative_to(folder)]
    names = {path.parts[0] + "/" * (len(path.parts) > 1) for path in inside}
    return names - NOT_LISTED


@pytest.mark.parametrize("folder", ["jaxcomm/", "ffi/"])
def test_tables_list_what_exists(folder):
    """A row such as `cuda/nccl/` means that the table also has all other folders of `cuda/`."""
    listed = listed_in(f"`{folder}`")
    exist = children(folder)
    for parent in {name.split("/")[0] for name in listed if name.count("/") > 1}:
        exist |= {f"{parent}/{name}" for name in children(f"{folder}{parent}") if name.endswith("/")}
    assert listed == exist, f"CONTRIBUTING.md, {folder}: add {exist - listed}, remove {listed - exist}"


def test_table_lists_the_other_folders():
    listed = listed_in("folder") | {"jaxcomm/", "ffi/"}
    exist = {name for name in children(".") if name.endswith("/")}
    assert listed == exist, f"CONTRIBUTING.md: add {exist - listed}, remove {listed - exist}"
