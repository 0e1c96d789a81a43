"""Mutants: rules for the texts of C++ and the syntax of Python make them, and authors, who write mistakes/*.toml."""

import ast
import copy
import hashlib
import pathlib
import re
import tomllib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """A text at `begin` in a file, and its replacement.

    `tests`: programs of CTest, or arguments of pytest. "tests/cpu": all programs of this folder. "thread:test_x": the
    program with ThreadSanitizer.
    """

    kind: str  # cxx, python or hand
    name: str
    file: str
    begin: int
    old: str
    new: str
    tests: str

    @property
    def place(self):
        return f"{self.file}:{(ROOT / self.file).read_text().count(chr(10), 0, self.begin) + 1}"

    def mutated(self):
        text = (ROOT / self.file).read_text()
        return text[: self.begin] + self.new + text[self.begin + len(self.old) :]


def order(seed, *parts):
    """A number that depends on the seed and on texts only, so that edits elsewhere keep the selection."""
    return hashlib.sha256("\0".join(map(str, (seed, *parts))).encode()).hexdigest()


# By hand.


def by_hand():
    found = []
    for path in sorted(pathlib.Path(__file__).parent.glob("mistakes/*.toml")):
        entries = tomllib.loads(path.read_text())
        for entry in entries["mistake"]:
            text = (ROOT / entry["file"]).read_text()
            assert text.count(entry["old"]) == 1, f"{entry['file']}: {entry['name']}: its text must occur once"
            found.append(Mutant("hand", begin=text.index(entry["old"]), **entry))
        for sources in entries.get("sources", ()):
            for file in sources["files"]:
                text = (ROOT / file).read_text()
                for rule in entries["rule"]:
                    for match in re.finditer(rule["old"], text, re.MULTILINE):
                        new = match.expand(rule["new"])
                        found.append(Mutant("hand", rule["name"], file, match.start(), match[0], new, sources["tests"]))
    return found


# C++. Binary operators have spaces on both sides, unlike brackets of templates, pointers and references. What does not
# compile has no result.

OTHER = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "+": "-", "-": "+", "*": "+", "/": "*",
    "%": "-", "&&": "||", "||": "&&", "min": "max", "max": "min",
}  # fmt: skip
RULES = {
    "operator": (r"(?<= )([<>]=?|[!=]=|[-+*/%]|&&|\|\|)(?= )", lambda match: OTHER[match[1]]),
    "bound": (r"(?<=std::)(min|max)(?=[(<])", lambda match: OTHER[match[1]]),
    "literal": (r"(?<![\w.<'])\d+(?![\w.'>])", lambda match: str(int(match[0]) + 1)),
    "jump": (r"\b(break|continue)(?=;)", lambda match: ""),
    "deletion": (r"(?<=  )(?!return|using|delete)[\w:.<>\[\]-]+(\(.*\)| [-+*|&]?= .*)(?=;$)", lambda match: ""),
    "swap": (r"(?<=[(,])( ?)(\w+), (\w+)(?=[,)])", lambda match: f"{match[1]}{match[3]}, {match[2]}"),
    "condition": (r"(?<=\bif )\(.*\)(?= |$)", lambda match: f"(!{match[0]})"),
}
IGNORED = r"//[^\n]*|^ *#[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'"
DEVICE = re.compile(r"JAXCOMM_(DEVICE|BOTH|EMULATION)|__device__")
CXX_TESTS = {
    "ffi/plan": "tests/plan tests/cpu",
    "ffi/cpu": "tests/cpu tests/transport",
    "ffi/transport": "tests/transport tests/cpu",
    "ffi/common": "tests/common tests/plan tests/cpu",
    "ffi/recorder": "tests/recorder",
    "ffi/cuda": "tests/cuda",
}


def folder(file):
    return "/".join(pathlib.Path(file).parent.parts[:2])


def of_cxx(file):
    text = (ROOT / file).read_text()
    code = re.sub(IGNORED, lambda match: " " * len(match[0]), text, flags=re.MULTILINE)
    found = []
    for name, (pattern, change) in RULES.items():
        for match in re.finditer(pattern, code, re.MULTILINE):
            old, begin = text[match.start() : match.end()], match.start()
            balanced = old.count("(") == old.count(")")
            if balanced and old == match[0]:  # without strings and comments
                found.append(Mutant("cxx", name, file, begin, old, change(match), CXX_TESTS[folder(file)]))
    return found


# Python.

SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Sub,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
# Of a module, or of those whose path begins so. Files that catch most come first. {0} is the module's name.
LOWERING_FOR_CUDA = (
    "tests/cuda/test_cuda_lowering.py --deselect=tests/cuda/test_cuda_lowering.py::test_every_collective_is_tried"
)
OPS = "tests/test_contract.py tests/test_errors.py tests/test_xla_algorithm.py"
PYTHON_TESTS = {
    "jaxcomm/__init__.py": "tests/test_contract.py",
    "jaxcomm/_check.py": "tests/test_errors.py tests/ops/test_psum.py",
    "jaxcomm/_compat.py": "tests/test_compat.py tests/test_xla_algorithm.py tests/ops/test_psum.py",
    "jaxcomm/_config.py": "tests/test_config.py tests/test_errors.py",
    "jaxcomm/_lowering.py": f"tests/test_lowering.py {LOWERING_FOR_CUDA} tests/ops/test_psum.py",
    "jaxcomm/_native.py": f"tests/test_headers.py tests/test_ffi_version.py {LOWERING_FOR_CUDA} tests/test_errors.py",
    "jaxcomm/_primitive.py": "tests/ops/test_options_of_ops.py tests/ops/test_psum.py tests/test_errors.py",
    "jaxcomm/_processes/": "tests/test_distributed.py tests/test_initialize.py tests/test_interfaces.py",
    "jaxcomm/distributed.py": "tests/test_initialize.py tests/test_distributed.py",
    "jaxcomm/_cost_params.py": "tests/plan/test_cost.py tests/test_calibrate.py tests/test_explain.py",
    "jaxcomm/_topology.py": "tests/test_explain.py tests/test_lowering.py tests/test_distributed.py",
    "jaxcomm/ops/psum.py": f"tests/ops/test_psum.py tests/ops/test_pmax.py tests/ops/test_options_of_ops.py {OPS}",
    "jaxcomm/ops/_shards.py": "tests/ops/test_reshard_in.py tests/test_reshard.py",
    "jaxcomm/ops/": f"tests/ops/test_{{0}}.py tests/ops/test_options_of_ops.py {OPS}",
    "jaxcomm/matmul/": "tests/matmul",
    "jaxcomm/moe/": "tests/moe",
    "jaxcomm/bench/": "tests/test_bench_report.py tests/test_bench.py",
    "jaxcomm/info/": "tests/test_info.py",
    "jaxcomm/": "tests/test_{0}.py",
    "models/lm/": "tests/models/test_moe_options.py tests/models/test_moe_command.py tests/models/test_scripts.py",
    "models/moe/": "tests/models/test_moe_step.py tests/models/test_moe_runs.py",
}


def python_tests(file):
    given = next(tests for start, tests in PYTHON_TESTS.items() if file.startswith(start))
    words = given.format(pathlib.Path(file).stem.lstrip("_")).split()
    return " ".join(word for word in words if word.startswith("--") or (ROOT / word).exists())


def changes(node):
    """(what, text in place of the node) of each mutant."""

    def changed(field, value):
        other = copy.copy(node)
        setattr(other, field, value)
        return f"({ast.unparse(other)})"

    operator = getattr(node, "op", None) or (len(getattr(node, "ops", ())) == 1 and node.ops[0])
    if not isinstance(node, ast.AugAssign) and type(operator) in SWAPPED:
        other = SWAPPED[type(operator)]()
        yield "operator", changed("ops", [other]) if isinstance(node, ast.Compare) else changed("op", other)
    if isinstance(node, ast.UnaryOp):
        yield "operator", f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "literal", repr(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.Break | ast.Continue):
        yield "jump", "continue" if isinstance(node, ast.Break) else "break"
    elif isinstance(node, ast.Raise | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ) or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)):  # fmt: skip
        yield "deletion", "pass"
    elif isinstance(node, ast.Call):
        for i, (a, b) in enumerate(zip(node.args, node.args[1:], strict=False)):
            if isinstance(a, ast.Name) and isinstance(b, ast.Name) and a.id != b.id:
                yield "swap", changed("args", [*node.args[:i], b, a, *node.args[i + 2 :]])


def of_python(file):
    text = (ROOT / file).read_text()
    lines = text.encode().splitlines(keepends=True)
    found = []

    def offset(line, column):
        return len((b"".join(lines[: line - 1]) + lines[line - 1][:column]).decode())

    def visit(node):
        begin, end = (offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset))
        made = list(changes(node))
        made += [("condition", f"not ({text[begin:end]})")] if node in conditions else []
        found.extend(Mutant("python", name, file, begin, text[begin:end], new, tests) for name, new in made)

    tree, tests = ast.parse(text), python_tests(file)
    conditions = {node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While | ast.IfExp)}
    skipped = (ast.JoinedStr, ast.MatchValue)  # Python 3.11 has no positions in f-strings
    pending = [tree]
    while pending:
        node = pending.pop()
        own = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        if isinstance(node, skipped) or "__name__" in own or "TYPE_CHECKING" in own:
            continue
        if hasattr(node, "lineno") and isinstance(node, ast.expr | ast.stmt):
            visit(node)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "returns", "type_params"):
                pending += [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, ast.AST)]
    return found


def of_folder(name):
    """All generated mutants of a folder, without those of its folders in Python. Python tests bindings of C++."""
    if name.startswith("ffi/"):
        files = [path for path in (ROOT / name).rglob("*") if path.suffix in (".cc", ".h") and "_py." not in path.name]
        files = [path for path in files if path.suffix == ".cc" or not DEVICE.search(path.read_text())]
        return [mutant for path in sorted(files) for mutant in of_cxx(str(path.relative_to(ROOT)))]
    return [m for path in sorted((ROOT / name).glob("*.py")) for m in of_python(str(path.relative_to(ROOT)))]
