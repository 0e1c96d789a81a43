"""Documents against the code: examples and output of the README, tables, commands, links."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxcomm import _core
from jaxcomm._request import NATIVE
from tools import benchmark_table

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FOLDERS = ("*", "docs/**/*", "benchmarks/*", "examples/*/*", "integrations/*/*", "models/**/*", "tests/mutation/*")
DOCUMENTS = [path for folder in FOLDERS for path in sorted(ROOT.glob(f"{folder}.md"))]
GUIDES = "operations choosing collective-matmul overlap failures moe observing reshard transfer"
PAGES_WITH_CODE = ["quickstart.md", *(f"guide/{name}.md" for name in GUIDES.split())]
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def run_python(folder, *arguments):
    """Output of a program in a fresh interpreter, with JAX's settings at their defaults, but compiled as here."""
    kept = "JAX_DISABLE_MOST_OPTIMIZATIONS"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA")) or k == kept}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_example(tmp_path):
    example, output = blocks(README, "python")[0], blocks(README, "text")[0]
    assert len(example.splitlines()) <= 15
    assert run_python(tmp_path, "-W", "error", "-c", example) == output


@pytest.mark.parametrize("page", [*PAGES_WITH_CODE, "../models/README.md"])
def test_examples_of_a_page(page, tmp_path):
    """Its blocks are one program, which prints its blocks of output, one after the other."""
    text = (ROOT / "docs" / page).read_text()
    output = run_python(tmp_path, "-W", "error", "-c", "\n".join(blocks(text, "python")))
    for expected in blocks(text, "text"):
        assert expected in output, expected
        output = output.split(expected, 1)[1]


def test_code_of_every_page_is_run_by_a_test():
    """clusters.md: tests/multiprocess/test_launchers.py; the device API: tests/cuda/test_device_headers.py."""
    pages = {str(path.relative_to(ROOT / "docs")) for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")}
    with_code = {page for page in pages if blocks((ROOT / "docs" / page).read_text(), "python")}
    assert with_code == {*PAGES_WITH_CODE, "guide/clusters.md", "guide/device-kernels.md"}


def test_example_of_several_processes(tmp_path):
    (command,) = blocks(README, "bash")
    (example,) = [block for block in blocks(README, "python") if "distributed.initialize()" in block]
    python, *arguments, script = command.split()
    assert python == "python"
    (tmp_path / script).write_text(example)
    lines = run_python(tmp_path, *arguments, script).splitlines()
    assert sorted(lines) == blocks(README, "text")[1].splitlines()


def test_table_of_operations():
    text = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| .* \| (\w+) \|$", text, flags=re.MULTILINE)
    assert {op: native for ops, native in rows for op in re.findall(r"`(\w+)`", ops)} == NATIVE


def test_every_collective_is_in_the_export_list_of_the_limits():
    text = (ROOT / "docs" / "guide" / "limits.md").read_text()
    named = set(re.findall(r"jaxcomm_[a-z_]+[a-z]", text))
    assert named | {f"jaxcomm_{native}" for native in NATIVE.values()} == set(_core.cpu_targets())


def test_benchmark_table_is_rendered_from_the_results(tmp_path):
    text = (ROOT / "benchmarks" / "README.md").read_text()
    page = tmp_path / "README.md"
    page.write_text(text)
    benchmark_table.update_markdown(str(page), benchmark_table.markdown(*benchmark_table.load(str(RESULTS))))
    assert page.read_text() == text


def test_continuous_integration_runs_the_commands_that_are_quoted():
    (quoted,) = blocks((ROOT / "CONTRIBUTING.md").read_text(), "bash")
    run = re.findall(r"^ *step \d+ (.*)$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert quoted.splitlines() == run


def test_quoted_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(" ".join(re.findall(r"^([a-z][a-z -]*):", makefile, flags=re.MULTILINE)).split())
    for document in DOCUMENTS:
        for target in re.findall(r"(?:^|`| {4})make ([a-z-]+)", document.read_text(), flags=re.MULTILINE):
            assert target in targets, f"{document.name}: make {target}"


def anchors(document):
    """The anchors that GitHub makes for the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", prose):
        if not target.startswith("http"):
            page = document.parent / target if target else document
            assert page.exists(), target
            assert not anchor or anchor in anchors(page), f"{target}#{anchor}"
