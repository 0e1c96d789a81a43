"""A new collective needs the places that CONTRIBUTING.md lists, all of them and no others.

The tests add a collective to a copy of the repository: `scatter`, whose public function is `pscatter`. Every rank gets
its block of the root.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import pytest

from jaxcomm import _core

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = pathlib.Path(sys.executable).parent
LISTED = re.search(r"^## Adding a collective$(.*?)^##", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S).group(1)
PLACES = [path.replace("X", "scatter").replace("F", "pscatter") for path in re.findall(r"^\d+\. `(.*?)`", LISTED, re.M)]

ROW = """
JAXCOMM_COLLECTIVE(kScatter, scatter, Scatter, "pscatter",
                   kArray, kPerRank, kOne, [](const Part& y) { return From(y.root, y.rank); },
                   [](double n, double g) { return g * (n - g) / n; }, "root", false)
"""
PLANS = """
#include "plan/builder.h"
#include "plan/partition.h"

namespace jaxcomm {
namespace {

Plan DirectScatter(const Request& request, int32_t rank) {
  const int64_t b = request.block_count;
  Builder plan(request, rank);
  if (CanRead(request.geometry, rank, request.root)) {
    plan.Move(Builder::At(request.root, Space::kInput, rank * b), plan.Output(0), b);
  }
  for (int32_t peer = 0; rank == request.root && peer < request.geometry.num_ranks(); ++peer) {
    if (CanRead(request.geometry, peer, rank)) continue;
    plan.Move(plan.Input(peer * b), Builder::At(peer, Space::kOutput, 0), b);
  }
  return std::move(plan).Finish(0);
}

}  // namespace

template <>
const std::vector<Algorithm>& Table<Collective::kScatter>() {
  static const std::vector<Algorithm> table = {{"direct", "a test", kAnyGeometry, DirectScatter}};
  return table;
}

}  // namespace jaxcomm
"""
OP = '''
"""pscatter (native name: scatter)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _compat
from jaxcomm._primitive import define
from jaxcomm.ops._shared import Options, collective, make_call
from typing import Unpack


@collective()
def pscatter(x: jax.Array, axis_name: str, source: int, **options: Unpack[Options]) -> jax.Array:
    """Gives every rank its block of the x of rank ``source``.

    Args:
      x: array of n blocks along the first dimension.
      source: rank whose blocks are sent.

    Returns:
      One block.

    Raises:
      ValueError: unknown algorithm.

    Cost: n - 1 messages of a block.
    """
    call = make_call("pscatter", "scatter", axis_name, None, options)
    return scatter_p.bind(_compat.make_varying(jnp.asarray(x), call.axes), call=call, source=source)


def _shape(x, *, call, source):
    return x.update(shape=(x.shape[0] // lax.axis_size(call.axes), *x.shape[1:]))


scatter_p = define(
    "scatter",
    shape=_shape,
    attributes=lambda x, n, *, source: {"root": np.int64(source)},
    batch_named=None,
    xla=None,
)
'''
TEST = """
import jax
import numpy as np
import reference
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm._measure.collectives import COLLECTIVES


def test_shape(line):
    f = jax.shard_map(lambda x: jaxcomm.pscatter(x, "gpu", 0), mesh=line, in_specs=P("gpu"), out_specs=P("gpu"))
    n = line.size
    assert jax.eval_shape(f, jax.ShapeDtypeStruct((n * n, 3), "float32")).shape == (n, 3)


def test_benchmark_case():
    case, xs = COLLECTIVES["pscatter"], np.arange(24).reshape(4, 6)[:, :4]
    np.testing.assert_array_equal(case.expect(xs, 1), reference.pscatter(xs, 0))
    assert (case.count_parts(4), case.bus_factor(4)) == (4, 3 / 16)
"""
# File: the text to add, and the text before which it stands; None: at the end, which also makes a new file.
EDITS = {
    "ffi/collectives.def": [(ROW, None)],
    "ffi/plan/algorithms/scatter.cc": [(PLANS, None)],
    "jaxcomm/ops/pscatter.py": [(OP, None)],
    "jaxcomm/__init__.py": [
        ("from jaxcomm.ops.pscatter import pscatter\n", "from jaxcomm.ops.psum import"),
        ('    "pscatter",\n', '    "psum",\n'),
    ],
    "tests/reference.py": [
        ("\n\ndef pscatter(blocks, source):\n    return np.split(blocks[source], len(blocks))\n", None)
    ],
    "tests/ops/test_pscatter.py": [(TEST, None)],
    "tests/plan/test_cost.py": [
        (
            '    ("scatter", "direct"): lambda n, r: ((n - 1 if r == 0 else 0, (n - 1) * B, 0), B, 0),\n',
            '    ("broadcast", "direct"):',
        )
    ],
    "docs/reference/algorithms.md": [
        ("| `pscatter` | its block of one rank | scatter |\n", "| `barrier` |"),
        ("\n## `scatter`\n\n| name | source |\n|---|---|\n| `direct` | a test |\n", None),
    ],
}
# A plugin of pytest. The module of this environment lacks the row, so it is read from the copy.
PLUGIN = """
import importlib.util
import os
import pathlib
import re
import sys
import types

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
spec = importlib.util.spec_from_file_location("jaxcomm._core", os.environ["CORE"])
core = sys.modules["jaxcomm._core"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)

ROOT = pathlib.Path(__file__).parent
row = re.search(r'\\(kScatter, (\\w+), Scatter, "(.*?)",\\s*k(\\w+), k(\\w+), k(\\w+),.*?"([^"]*)", \\w+\\)',
                (ROOT / "ffi/collectives.def").read_text(), re.S)
if row:
    name, functions, elements, source, result, attributes = row.groups()
    blocks = {"PerRank": "per_rank", "One": "one"}
    rows = [*core.plan.collectives(), types.SimpleNamespace(
        name=name, functions=functions.split(), elements=elements.lower(), input=blocks[source], output=blocks[result],
        reduces=False, attributes=attributes.split(), expected=lambda rank, block, root, source: (root, rank),
        blocks_into=lambda n, g: g * (n - g) / n)]
    algorithms, targets = core.plan.algorithms, core.cpu_targets()
    targets["jaxcomm_scatter"] = targets["jaxcomm_permute"]
    core.plan.collectives = lambda: rows
    core.plan.algorithms = lambda of: [("direct", "a test")] if of == name else algorithms(of)
    core.cpu_targets = lambda: targets
"""
CHECKS = (
    "tests/test_contract.py",
    "tests/test_readme.py::test_table_of_operations",
    "tests/plan/test_cost.py::test_there_is_a_formula_for_every_algorithm",
    "tests/plan/test_cost.py::test_the_document_lists_every_algorithm",
)
PROGRAM = """
#include <cstdio>

#include "plan/resolve.h"
#include "plan/validate.h"

using namespace jaxcomm;

int main() {
  for (const Algorithm& algorithm : Algorithms(Collective::kScatter)) {
    for (const int32_t nodes : {1, 2, 3}) {
      for (const bool addressable : {false, true}) {
        Request request;
        request.collective = Collective::kScatter;
        request.geometry = {nodes, 4, addressable};
        request.block_count = 5;
        request.root = 2;
        const Status status = Validate(BuildAll(algorithm, request), request);
        if (!status.ok()) return std::puts(status.message().c_str()), 1;
      }
    }
  }
  CallSpec spec;
  spec.collective = Collective::kScatter;
  spec.op = "pscatter";
  spec.group_size = spec.ranks_per_node = 8;
  Placement placement;
  placement.ranks_per_node = 8;
  Capabilities capabilities;
  capabilities.machine = GpuMachine();
  const StatusOr<Resolution> found = Resolve(spec, {DType::kF32, 800, 100}, placement, capabilities);
  if (!found.ok()) return std::puts(found.status().message().c_str()), 1;
  std::printf("%s %d", found->algorithm.c_str(), CostOf(*found).time_s > 0);
}
"""


def add_collective(tree):
    """Copies the repository and adds the collective."""
    for path in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        if (ROOT / path).is_file():
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, tree / path)
    for path, edits in EDITS.items():
        text = (tree / path).read_text() if (tree / path).exists() else ""
        for added, before in edits:
            assert before is None or text.count(before) == 1, (path, before)
            text = text + added if before is None else text.replace(before, added + before)
        (tree / path).write_text(text)


def run(*command, cwd, **environment):
    env, to_one = {**os.environ, **environment}, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=cwd, env=env, **to_one, text=True, timeout=250, check=False)
    return done.returncode, done.stdout


def check(tree):
    """Runs the tests that compare the layers."""
    (tree / "toy_core.py").write_text(PLUGIN)
    own = [path for path in ("tests/ops/test_pscatter.py",) if (tree / path).exists()]
    command = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "toy_core", "-p", "no:cacheprovider", "-n", "0")
    picked = ("-k", "not mutants and not source_files", *CHECKS, *own)
    return run(*command, *picked, cwd=tree, PYTHONPATH=str(tree), CORE=_core.__file__)


def test_contributing_lists_at_most_eight_places():
    assert len(PLACES) <= 8
    assert list(EDITS) == PLACES


@pytest.mark.full
def test_the_listed_places_are_enough(tmp_path):
    add_collective(tmp_path)
    status, output = check(tmp_path)
    assert status == 0, output
    program, build = tmp_path / "program.cc", tmp_path / "build"
    program.write_text(PROGRAM)
    for command in (
        (TOOLS / "cmake", "-S", tmp_path, "-B", build, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}",
         "-DJAXCOMM_NATIVE_TESTS=ON", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O0"),
        (TOOLS / "cmake", "--build", build, "--target", "jaxcomm_plans"),
        ("sh", "-c", f"c++ -std=c++17 -pthread -I ffi program.cc $(find {build} -name '*.o') -ldl -o {build}/program"),
        ("c++", "-std=c++17", "-E", "-I", "ffi", "-isystem", jax.ffi.include_dir(), "ffi/handlers/one_operand.cc"),
    ):  # fmt: skip
        status, output = run(*command, cwd=tmp_path)
        assert status == 0, output
    assert "ScatterExecute" in output  # the preprocessed handlers
    assert run(build / "program", cwd=tmp_path) == (0, "direct 1")
