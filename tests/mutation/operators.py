"""Mutation operators: a selection of cosmic-ray's, deletion of a statement, and swap of neighbouring arguments."""

import ast
import itertools
import pathlib
import re

import parso
from cosmic_ray.ast import get_ast
from cosmic_ray.operators import provider
from cosmic_ray.operators.operator import Example, Operator

from .record import Mutant


class DeleteStatement(Operator):
    """Deletes calls whose result is unused, assignments to items and attributes, and augmented assignments."""

    def mutation_positions(self, node):
        if node.type not in ("simple_stmt",):
            return
        statement = node.children[0]
        calls = statement.type in ("power", "atom_expr") and statement.children[-1].type == "trailer"
        assigns = statement.type == "expr_stmt" and re.match(
            r"[\w.]+(\.\w+|\[.*\])\s*=[^=]|\w+\s*[-+*|]=", statement.get_code()
        )
        if calls or assigns or statement.type == "raise_stmt":
            yield (statement.start_pos, statement.end_pos)

    def mutate(self, node, index):
        statement = node.children[0]
        node.children[0] = parso.parse(statement.get_first_leaf().prefix + "pass").children[0]
        return node

    @classmethod
    def examples(cls):
        return (Example("f(x)\n", "pass\n"),)


class SwapArguments(Operator):
    """Swaps two neighbouring names that are passed by position."""

    def _pairs(self, node):
        if node.type != "arglist":
            return []
        arguments = node.children[::2]
        pairs = itertools.pairwise(arguments)
        return [(a, b) for a, b in pairs if a.type == b.type == "name" and a.value != b.value]

    def mutation_positions(self, node):
        for first, second in self._pairs(node):
            yield (first.start_pos, second.end_pos)

    def mutate(self, node, index):
        first, second = self._pairs(node)[index]
        first.value, second.value = second.value, first.value
        return node

    @classmethod
    def examples(cls):
        return (Example("f(a, b)", "f(b, a)"),)


# One replacement for each operator: a test that catches one usually catches the others.
BINARY = (
    "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mul Mod_Sub LShift_RShift RShift_LShift BitAnd_BitOr BitOr_BitAnd Pow_Mul"
)
COMPARISON = "Eq_NotEq NotEq_Eq Lt_LtE LtE_Lt Gt_GtE GtE_Gt Is_IsNot IsNot_Is"
OTHERS = (
    "ReplaceUnaryOperator_USub_UAdd ReplaceUnaryOperator_Delete_Not AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue "
    "ReplaceAndWithOr ReplaceOrWithAnd ReplaceBreakWithContinue ReplaceContinueWithBreak ExceptionReplacer "
    "NumberReplacer RemoveDecorator ZeroIterationForLoop"
)
NAMES = [f"ReplaceBinaryOperator_{name}" for name in BINARY.split()]
NAMES += [f"ReplaceComparisonOperator_{name}" for name in COMPARISON.split()]
NAMES += OTHERS.split()
OPERATORS = {
    **{name: provider.OperatorProvider()[name]() for name in NAMES},
    "DeleteStatement": DeleteStatement(),
    "SwapArguments": SwapArguments(),
}


def _nodes(node):
    yield node
    for child in getattr(node, "children", ()):
        yield from _nodes(child)


def _static(node):
    """Whether a node is part of an annotation, which does not run."""
    while node.parent is not None:
        parent = node.parent
        if parent.type == "annassign" and node is parent.children[1]:
            return True
        if parent.type in ("param", "tfpdef") and node is not parent.children[-1]:
            return True
        if parent.type == "tfpdef" or (parent.type == "funcdef" and node is parent.annotation):
            return True
        node = parent
    return False


def mutants(root, name):
    """All mutants of a file."""
    source = pathlib.Path(root, name).read_text()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found, seen = [], {}
    for i, node in enumerate(_nodes(get_ast(source))):
        for kind, operator in OPERATORS.items():
            for j, (begin, end) in enumerate(operator.mutation_positions(node)):
                text = lines[begin[0] - 1].strip()
                skipped = (
                    '__name__ == "__main__"' in text or "TYPE_CHECKING" in text or (kind, j) == ("NumberReplacer", 1)
                )
                if skipped or _static(node):
                    continue
                what = " ".join(source[starts[begin[0] - 1] + begin[1] : starts[end[0] - 1] + end[1]].split())
                change = f"{kind}: {what if len(what) <= 80 else what[:38] + ' ... ' + what[-37:]}"
                times = seen[text, change] = seen.get((text, change), 0) + 1
                change += f" #{times}" if times > 1 else ""
                found.append(Mutant(name, begin[0], kind, text, change, (i, j)))
    return found


def apply(root, mutant):
    """The text of the file with a mutant, or None if the mutant is invalid or changes nothing."""
    source = pathlib.Path(root, mutant.file).read_text()
    tree = get_ast(source)
    node = next(node for i, node in enumerate(_nodes(tree)) if i == mutant.place[0])
    parent = node.parent
    try:
        after = OPERATORS[mutant.kind].mutate(node, mutant.place[1])
        if after is not node:
            children = [after if child is node else child for child in parent.children]
            parent.children = [child for child in children if child is not None]
        code = tree.get_code()
        if ast.dump(ast.parse(code)) == ast.dump(ast.parse(source)):
            return None
    except (SyntaxError, AttributeError):
        return None
    return code
