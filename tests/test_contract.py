"""Each collective has the same name in every layer, and no layer is missing."""

import importlib
import inspect
import operator
import pathlib
import pkgutil
import re

import jax
import pytest
import reference
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import _core
from jaxcomm._request import NATIVE

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = re.findall(r"^JAXCOMM_COLLECTIVE\(\s*(\w+), (\w+), (\w+),", (ROOT / "ffi/collectives.def").read_text(), re.M)
FILES = {"pmean": "psum", "pmax": "psum", "pmin": "psum"}  # public ops that share a file


def read(path):
    return (ROOT / path).read_text()


def test_the_list_is_complete():
    """Every row is built, its functions are public, and every public collective has a row."""
    rows = _core.plan.collectives()
    assert [name for _, name, _ in ROWS] == [row.name for row in rows]
    for function in (function for row in rows for function in row.functions):
        assert callable(operator.attrgetter(function)(jaxcomm)), function
    functions = {name for name in jaxcomm.__all__ if inspect.isfunction(getattr(jaxcomm, name))}
    of_ops = {name for name in functions if getattr(jaxcomm, name).__module__.startswith("jaxcomm.ops.")}
    assert of_ops == {function for row in rows for function in row.functions if "." not in function}


@pytest.mark.parametrize(("enumerator", "name"), [row[:2] for row in ROWS])
def test_every_collective_has_its_native_layers(enumerator, name):
    assert f"Table<Collective::{enumerator}>" in read(f"ffi/plan/algorithms/{name}.cc")
    assert set(_core.cpu_targets()[f"jaxcomm_{name}"]) == {"instantiate", "execute"}
    page = read("docs/reference/algorithms.md")
    assert f"## `{name}`" in page
    assert (algorithms := _core.plan.algorithms(name))
    assert all(f"`{algorithm}`" in page and source for algorithm, source in algorithms)


@pytest.mark.parametrize(("op", "native"), NATIVE.items())
def test_every_op_has_its_python_layers(op, native):
    assert op in jaxcomm.__all__
    assert native in read(f"jaxcomm/ops/{FILES.get(op, op)}.py")
    assert (ROOT / f"tests/ops/test_{op}.py").exists()
    assert hasattr(reference, op)


@pytest.mark.parametrize("op", [op for op in NATIVE if hasattr(jax.lax, op)])
def test_every_op_takes_the_arguments_of_jax_lax(op):
    """Same names, order, kinds and defaults as jax.lax, followed by jaxcomm's own arguments."""
    ours, lax = (list(inspect.signature(getattr(library, op)).parameters.values()) for library in (jaxcomm, jax.lax))
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("algorithm", "max_sms")]
    assert [p.replace(annotation=p.empty) for p in ours] == [p.replace(annotation=p.empty) for p in [*lax, *own]]


STARTS = [op for op in NATIVE if hasattr(jaxcomm, f"{op}_start")]


def test_start_functions_take_the_arguments_of_their_op():
    assert len(STARTS) == 6
    for op in STARTS:
        own, start = (inspect.signature(getattr(jaxcomm, name)) for name in (op, f"{op}_start"))
        assert list(start.parameters.values())[:-1] == list(own.parameters.values())
        assert (start.parameters["after"].default, start.return_annotation) == ((), jaxcomm.Pending)


@pytest.mark.parametrize("op", [*NATIVE, *(f"{op}_start" for op in STARTS)])
def test_help_documents_every_argument(op):
    function = getattr(jaxcomm, op)
    for name in inspect.signature(function).parameters:
        assert re.search(rf"^  {name}: \S", function.__doc__, re.M), name
    assert [function.__doc__.count(title) for title in ("Args:", "Returns:", "Raises:", "Cost:")] == [1] * 4
    assert "  jax.errors.JaxRuntimeError: " in function.__doc__
    # Sphinx takes a text before a colon for the type of the result.
    assert re.search(r"^Returns:\n  [^:]*(:``[^:]*)?$", function.__doc__, re.M)


@pytest.mark.parametrize("op", ["all_gather", "all_gather_start"])
def test_unknown_keywords_are_named(op):
    wrong = "algoritm" if op == "all_gather_start" else "after"
    with pytest.raises(TypeError, match=rf"{op}\(\) got an unexpected keyword argument '{wrong}'"):
        getattr(jaxcomm, op)(1.0, "i", **{wrong: None})


# The results of ragged_all_to_all are those of its second operand: tests/ops/test_ragged_all_to_all.py.
@pytest.mark.parametrize("op", [op for op in NATIVE if op != "ragged_all_to_all"])
def test_results_are_weakly_typed_where_those_of_jax_lax_are(op, line):
    """Otherwise a Python number would widen small types after a collective."""
    arguments = {"ppermute": ([(0, 1)],), "all_to_all": (0, 0), "pbroadcast": (1,)}.get(op, ())
    found = []

    def body(x):
        weak = jax.lax.broadcast(2.0, (8,))
        assert jax.typeof(weak).weak_type
        ours = getattr(jaxcomm, op)(weak, ("gpu",), *arguments)
        # A barrier, which jax.lax lacks, returns its operand.
        lax = weak if op == "barrier" else getattr(jax.lax, op)(weak, ("gpu",), *arguments)
        found.extend(map(jax.typeof, (ours, lax)))
        return x

    x = jax.ShapeDtypeStruct((8,), "float32")
    jax.eval_shape(jax.shard_map(body, mesh=line, in_specs=P("gpu"), out_specs=P("gpu"), check_vma=False), x)
    ours, lax = found
    assert (ours.shape, ours.dtype, ours.weak_type) == (lax.shape, lax.dtype, lax.weak_type)


def test_public_names_are_functions_and_types():
    """Implementation modules are private, so that importing one can't replace the function of the same name."""
    modules = {module.name for module in pkgutil.iter_modules(jaxcomm.__path__)}
    public = {name for name in modules if not name.startswith("_")}
    in_all = ["distributed", "moe", "recorder", "transfer"]
    assert public == {*in_all, "bench", "info", "matmul", "ops", "run", "selftest", "simulate"}
    importlib.import_module("jaxcomm.info")
    assert [name for name in jaxcomm.__all__ if inspect.ismodule(getattr(jaxcomm, name))] == in_all
    assert public & set(jaxcomm.__all__) == {*in_all, "info"}  # python -m jaxcomm.info, jaxcomm.info()


# Names of XLA, NCCL and PyTorch, arguments, and programs of the self-test.
OTHER_LISTS = {
    "__init__", "_explain", "_selftest_programs", "recorder/_pytorch", "simulate/step/hlo", "simulate/step/jaxpr",
}  # fmt: skip


def test_a_new_collective_needs_the_listed_places_only():
    """No other C++ file names a plain collective, and no other Python file has all functions."""
    _, _, section = read("CONTRIBUTING.md").partition("## Adding a collective\n")
    places = re.findall(r"^\d+\. `(.*?)`", section.partition("\n## ")[0], re.M)
    assert len(places) <= 8
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "ffi").rglob("*.*")}
    for enumerator, name, functions in ROWS:
        if name in ("permute", "broadcast"):
            named = {file for file, text in sources.items() if re.search(rf"\b({enumerator}|{functions})\b", text)}
            assert named == {places[0], places[1].replace("X", name)}
    package = ROOT / "jaxcomm"
    texts = {path.relative_to(package).with_suffix("").as_posix(): path.read_text() for path in package.rglob("*.py")}
    lists = {file for file, text in texts.items() if all(re.search(rf"\b{op}\b", text) for op in STARTS)}
    assert lists == OTHER_LISTS
    assert all((ROOT / place.replace("X", "permute").replace("F", "ppermute")).exists() for place in places)


def test_mutants_fit_the_sources():
    """Mistakes of mistakes/*.toml are few. Each replaces a text that occurs once in its file."""
    assert 0 < len(importlib.import_module("mutation.mutants").by_hand()) <= 250


def test_source_files_are_short():
    """A longer file holds a second idea: split it where its parts meet."""
    folders = ("benchmarks", "cmake", "docs", "examples", "ffi", "integrations", "jaxcomm", "models", "tests")
    kinds = {".cc", ".h", ".cu", ".cuh", ".py", ".md", ".cmake", ".txt"}
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds]
    assert len(files) > 400
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {path: length for path, length in lengths.items() if length > 500} == {}
