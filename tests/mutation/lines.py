"""Marks the Python statements that run, also in the processes that tests start.

The sources under test are compiled with an assignment before each statement. Other code is unchanged. The environment
variable MUTANT_LINES holds JSON: `marks`, a file with a byte for each line, and `first`, {path of a source: number of
its line 0}. Its name does not contain "JAX", because some tests start processes without the variables that do.
"""

import ast
import builtins
import importlib.machinery
import json
import mmap
import os
import sys

VARIABLE = "MUTANT_LINES"


def first_line(statement):
    """The first line of a statement, decorators included."""
    return min([statement.lineno, *(mark.lineno for mark in getattr(statement, "decorator_list", ()))])


class _Instrument(ast.NodeTransformer):
    def __init__(self, first):
        self.first = first

    def generic_visit(self, node):
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [new for old in statements for new in self.marked(old)])
        return node

    def marked(self, statement):
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if docstring or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            return [statement]
        mark = ast.parse(f"_mutant_marks[{self.first + first_line(statement)}] = 1").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        return [mark, statement]


def start():
    settings = json.loads(os.environ[VARIABLE])
    first = settings["first"]
    with open(settings["marks"], "r+b") as file:
        builtins._mutant_marks = marks = mmap.mmap(file.fileno(), 0)
    for path in first.keys() & set(sys.orig_argv):  # scripts bypass the loader: mark all their lines
        with open(path) as file:
            for line, _ in enumerate(file, first[path] + 1):
                marks[line] = 1
    compile_ = importlib.machinery.SourceFileLoader.source_to_code

    def source_to_code(self, data, path, **options):
        if path in first:
            data = ast.fix_missing_locations(_Instrument(first[path]).visit(ast.parse(data)))
            return compile(data, path, "exec", dont_inherit=True)
        return compile_(self, data, path, **options)

    importlib.machinery.SourceFileLoader.source_to_code = source_to_code
