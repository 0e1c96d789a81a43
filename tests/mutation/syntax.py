"""Generates mutants of C++ from the syntax tree of libclang. Each is a switch in the source, so one build serves all.

An edit replaces a range of a file by texts and inner ranges, which are rendered with their own edits. Line numbers do
not change, so compiler errors in the rewritten source hold for the original.
"""

import functools
import itertools
import pathlib
import re
import subprocess
import sysconfig
from typing import NamedTuple

import clang.cindex as cindex
from clang.cindex import CursorKind, TypeKind

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = {
    "+": ("Add", "-"),
    "-": ("Subtract", "+"),
    "*": ("Multiply", "+"),
    "/": ("Divide", "*"),
    "%": ("Modulo", "-"),
    "<<": ("ShiftLeft", ">>"),
    ">>": ("ShiftRight", "<<"),
    "&": ("BitAnd", "|"),
    "|": ("BitOr", "&"),
    "^": ("BitXor", "|"),
    "<": ("Less", "<="),
    "<=": ("LessEqual", "<"),
    ">": ("Greater", ">="),
    ">=": ("GreaterEqual", ">"),
    "==": ("Equal", "!="),
    "!=": ("NotEqual", "=="),
}
RELATIONS = {"<", "<=", ">", ">=", "==", "!="}
SKIPPED = {
    CursorKind.ENUM_DECL,
    CursorKind.STATIC_ASSERT,
    CursorKind.PARM_DECL,
    CursorKind.TYPE_ALIAS_DECL,
    CursorKind.TYPEDEF_DECL,
    CursorKind.CXX_UNARY_EXPR,  # sizeof
    CursorKind.FRIEND_DECL,
}
FUNCTIONS = {
    CursorKind.FUNCTION_DECL,
    CursorKind.CXX_METHOD,
    CursorKind.CONSTRUCTOR,
    CursorKind.DESTRUCTOR,
    CursorKind.CONVERSION_FUNCTION,
    CursorKind.FUNCTION_TEMPLATE,
}
BODIES = {CursorKind.COMPOUND_STMT, CursorKind.CASE_STMT, CursorKind.DEFAULT_STMT}
CASTS = {
    CursorKind.CXX_STATIC_CAST_EXPR,
    CursorKind.CXX_REINTERPRET_CAST_EXPR,
    CursorKind.CXX_CONST_CAST_EXPR,
    CursorKind.CXX_DYNAMIC_CAST_EXPR,
    CursorKind.CXX_FUNCTIONAL_CAST_EXPR,
    CursorKind.CSTYLE_CAST_EXPR,
}
INTEGERS = set(range(TypeKind.BOOL.value, TypeKind.INT128.value + 1))
FLOATS = {TypeKind.FLOAT.value, TypeKind.DOUBLE.value, TypeKind.LONGDOUBLE.value}


class Edit(NamedTuple):
    """Replaces [begin, end) by texts and inner ranges. `{id}` in a text becomes the number of its switch."""

    begin: int
    end: int
    parts: tuple
    kind: str
    change: str


def include_folders(wheels=ROOT / "build/cuda/wheels/nvidia"):
    import jaxlib
    import nanobind

    folders = [
        ROOT / "ffi",
        ROOT / "ffi/include",
        pathlib.Path(jaxlib.__file__).parent / "include",
        pathlib.Path(nanobind.__file__).parent / "include",
        pathlib.Path(sysconfig.get_path("include")),
        wheels / "nccl/include",
        wheels / "cu13/include",
    ]
    # libclang's wheel contains no compiler headers.
    gcc = subprocess.run(["c++", "-print-file-name=include"], capture_output=True, text=True).stdout.strip()
    return [*map(str, folders), gcc]


class Source:
    """A file of the repository: its text and edits."""

    def __init__(self, path):
        self.path = path
        self.bytes = pathlib.Path(path).read_bytes()
        self.edits = []
        self.macros = []

    def text(self, begin, end):
        return self.bytes[begin:end].decode()

    def line(self, offset):
        return self.bytes.count(b"\n", 0, offset) + 1

    def line_text(self, offset):
        return self.bytes.decode().splitlines()[self.line(offset) - 1].strip()

    def in_macro(self, begin, end):
        """Whether a range cuts a macro or is inside of one."""
        return any(b <= begin < e or b < end <= e for b, e in self.macros)

    def add(self, edit):
        if self.in_macro(edit.begin, edit.end):
            return
        for other in self.edits:
            crossing = (
                other.begin < edit.begin < other.end < edit.end or edit.begin < other.begin < edit.end < other.end
            )
            if crossing:
                return
            # An edit inside another one must be in one of its inner ranges.
            if other.begin <= edit.begin and edit.end <= other.end:
                inner = [part for part in other.parts if not isinstance(part, str)]
                if not any(b <= edit.begin and edit.end <= e for b, e in inner):
                    return
        self.edits.append(edit)

    def inserting_lines(self, edit):
        offsets = [edit.begin, edit.end - 1]
        for part in edit.parts:
            if not isinstance(part, str):
                offsets += [part[0], part[1] - 1]
        return {self.line(offset) for offset in offsets}

    def render(self, chosen):
        """The text with the edits {index in edits: number of switch}."""
        edits = [(self.edits[index], number) for index, number in chosen.items()]
        # If two have the same range, the earlier one is outside.
        edits.sort(key=lambda pair: (pair[0].begin, -pair[0].end))
        return self._render(0, len(self.bytes), edits)

    def _render(self, begin, end, edits):
        text, position = "", begin
        while edits:
            (edit, number), *rest = edits
            inside = [pair for pair in rest if pair[0].end <= edit.end and pair[0].begin >= edit.begin]
            text += self.text(position, edit.begin)
            for part in edit.parts:
                if isinstance(part, str):
                    text += part.replace("{id}", str(number))
                else:
                    within = [pair for pair in inside if pair[0].begin >= part[0] and pair[0].end <= part[1]]
                    text += self._render(*part, within)
            position = edit.end
            edits = [pair for pair in rest if pair[0].begin >= edit.end]
        return text + self.text(position, end)


def short(text):
    """The text in one line, without comments."""
    text = " ".join(re.sub(r"//[^\n]*", "", text).split())
    return text if len(text) <= 100 else text[:48] + " ... " + text[-47:]


def one_line(text):
    """The code in one line, or None if it contains comments or directives."""
    return None if "//" in text or "#" in text else " ".join(text.split("\n"))


class Walker:
    def __init__(self, source):
        self.source = source

    def range(self, cursor):
        extent = cursor.extent
        return extent.start.offset, extent.end.offset

    def text(self, cursor):
        return self.source.text(*self.range(cursor))

    def add(self, span, parts, kind, change):
        self.source.add(Edit(span[0], span[1], tuple(parts), kind, change))

    def walk(self, cursor, condition=False, statement=False):
        kind = cursor.kind
        if kind in SKIPPED or kind.is_attribute() or kind.is_reference():
            return
        if kind in FUNCTIONS or kind is CursorKind.VAR_DECL:
            head = self.text(cursor).split("{")[0].split("=")[0]
            if re.search(r"\b(constexpr|consteval|thread_local)\b", head):
                return
        if cursor.extent.start.file is None or cursor.extent.start.file.name != self.source.path:
            return
        begin, end = self.range(cursor)
        if begin >= end:
            return
        if statement:
            self.statement(cursor)
        if condition:
            self.condition(cursor)
        handler = getattr(self, "visit_" + kind.name.lower(), None)
        children = list(cursor.get_children())
        if handler:
            children = handler(cursor, children, condition) or children
        for child, role in self.roles(cursor, children):
            self.walk(child, role == "condition", role == "statement")

    def roles(self, cursor, children):
        """The children to walk, each with its role."""
        kind = cursor.kind
        begin = cursor.extent.start.offset
        if kind is CursorKind.IF_STMT:
            if re.match(r"if\s+constexpr", self.text(cursor)):
                return [(child, "statement") for child in children[1:]]
            first = 1 if children[0].kind is CursorKind.DECL_STMT else 0
            declares = children[first].kind is CursorKind.VAR_DECL
            pairs = [(child, "") for child in children[:first]]
            if declares:
                first += 0 if len(children) <= first + 1 or not children[first + 1].kind.is_expression() else 1
                pairs = [(child, "") for child in children[:first]]
            pairs += [(children[first], "" if declares else "condition")]
            return pairs + [(child, "statement") for child in children[first + 1 :]]
        if kind is CursorKind.WHILE_STMT:
            role = "" if children[0].kind is CursorKind.VAR_DECL else "condition"
            return [*((child, role) for child in children[:-1]), (children[-1], "statement")]
        if kind is CursorKind.DO_STMT:
            return [(children[0], "statement"), (children[1], "condition")]
        if kind in (CursorKind.FOR_STMT, CursorKind.CXX_FOR_RANGE_STMT):
            return [*((child, "") for child in children[:-1]), (children[-1], "statement")]
        if kind is CursorKind.CONDITIONAL_OPERATOR:
            return [(children[0], "condition"), *((child, "") for child in children[1:])]
        if kind is CursorKind.CASE_STMT:
            return [(child, "statement") for child in children[1:]]
        if kind in BODIES:
            return [(child, "statement") for child in children]
        if kind in CASTS:
            return [(child, "") for child in children[-1:]]
        if kind is CursorKind.DECL_REF_EXPR:
            return []
        if kind is CursorKind.MEMBER_REF_EXPR:
            return [(child, "") for child in children if child.extent.start.offset == begin]
        if kind in (CursorKind.VAR_DECL, CursorKind.FIELD_DECL):  # without array bounds and template arguments
            name = cursor.location.offset
            rest = [child for child in children if child.extent.start.offset > name]
            bound = self.source.text(name, cursor.extent.end.offset)
            return [] if re.match(r"\w*\s*\[", bound) else [(child, "") for child in rest]
        return [(child, "") for child in children]

    def statement(self, cursor):
        span = self.range(cursor)
        kinds = (CursorKind.BREAK_STMT, CursorKind.CONTINUE_STMT)
        returns = cursor.kind is CursorKind.RETURN_STMT and not list(cursor.get_children())
        if not (cursor.kind.is_expression() or cursor.kind in kinds or returns):
            return
        after = re.match(rb"\s*;", self.source.bytes[span[1] :])
        if not after or self.text(cursor).startswith("(void)"):
            return
        end = span[1] + after.end()
        what = "deletion" if cursor.kind.is_expression() else "jump"
        self.add(
            (span[0], end),
            ["{ if (!jm::On({id})) { ", (span[0], end), " } }"],
            what,
            f"delete {short(self.text(cursor))}",
        )

    def condition(self, cursor):
        span = self.range(cursor)
        if not cursor.kind.is_expression():
            return
        parts = ["(jm::On({id}) != static_cast<bool>(", span, "))"]
        self.add(span, parts, "condition", f"negate {short(self.text(cursor))}")

    def arithmetic(self, cursor):
        return cursor.type.get_canonical().kind.value in INTEGERS | FLOATS

    def visit_binary_operator(self, cursor, children, condition):
        if len(children) != 2:
            return
        left, right = map(self.range, children)
        gap = re.sub(r"/\*.*?\*/|//[^\n]*", "", self.source.text(left[1], right[0])).strip()
        span = (left[0], right[1])
        texts = [short(self.text(child)) for child in children]
        if gap in ("&&", "||"):
            dropped = ("(jm::On({id}) || ", ")") if gap == "&&" else ("(!jm::On({id}) && ", ")")
            for side, text in ((left, texts[0]), (right, texts[1])):
                parts = [dropped[0] + "static_cast<bool>(", side, ")" + dropped[1]]
                self.add(side, parts, "logic", f"drop {text} of {texts[0]} {gap} {texts[1]}")
            return
        if gap not in BINARY:
            return
        types = [child.type.get_canonical() for child in children]
        pointer = gap in ("+", "-") and types[0].kind is TypeKind.POINTER and types[1].kind.value in INTEGERS
        if gap not in RELATIONS and not pointer and not all(map(self.arithmetic, children)):
            return
        if gap in ("==", "!=") and condition:
            return  # equal to the negated condition
        name, other = BINARY[gap]
        kind = "relation" if gap in RELATIONS else "arithmetic"
        change = f"{texts[0]} {gap} {texts[1]}: {gap} becomes {other}"
        lines = "\n" * self.source.text(left[1], right[0]).count("\n")
        self.add(span, [f"jm::{name}({{id}}, ", left, ", " + lines, right, ")"], kind, change)

    def visit_compound_assignment_operator(self, cursor, children, condition):
        if len(children) != 2:
            return
        left, right = map(self.range, children)
        gap = self.source.text(left[1], right[0]).strip()
        if gap in ("+=", "-=") and self.arithmetic(children[1]):
            change = f"{short(self.text(cursor))}: the sign"
            self.add(right, ["jm::Negate({id}, ", right, ")"], "arithmetic", change)

    def visit_unary_operator(self, cursor, children, condition):
        text = self.text(cursor)
        span = self.range(cursor)
        if text.startswith("!") and not condition:
            self.add(span, ["(jm::On({id}) != static_cast<bool>(", span, "))"], "condition", f"negate {short(text)}")
        # An operator whose result is unused is covered by its deletion. An endless loop would show nothing.
        operator = re.match(r"(\+\+|--)|.*?(\+\+|--)$", text, re.DOTALL)
        parent_uses = operator and not re.match(rb"\s*[;)]", self.source.bytes[span[1] :])
        if parent_uses and one_line(text):
            swap = {"++": "--", "--": "++"}
            mutated = re.sub(r"^(\+\+|--)|(\+\+|--)$", lambda match: swap[match.group()], text)
            parts = [f"(jm::On({{id}}) ? ({one_line(mutated)}) : (", span, "))"]
            self.add(span, parts, "arithmetic", f"{short(text)} becomes {short(mutated)}")

    def visit_integer_literal(self, cursor, children, condition):
        self.number(cursor)

    def visit_floating_literal(self, cursor, children, condition):
        span = self.range(cursor)
        text = self.text(cursor)
        if re.fullmatch(r"[\d.][\w.+-]*", text) and float(text.rstrip("fFlL")) != 0:
            change = f"twice {self.marked(span)}"
            self.add(span, ["(", span, " * (1 + jm::On({id})))"], "literal", change)

    def number(self, cursor):
        span = self.range(cursor)
        if re.fullmatch(r"[\d.][\w.']*", self.text(cursor)):
            change = f"1 more than {self.marked(span)}"
            self.add(span, ["(", span, " + jm::On({id}))"], "literal", change)

    def marked(self, span):
        """The line of a literal, with the literal in brackets."""
        begin = self.source.bytes.rfind(b"\n", 0, span[0]) + 1
        end = self.source.bytes.find(b"\n", span[1])
        before, after = self.source.text(begin, span[0]).lstrip(), self.source.text(span[1], end)
        return f"[{self.source.text(*span)}] in {before[-40:]}[{self.source.text(*span)}]{after[:40]}"

    def visit_cxx_bool_literal_expr(self, cursor, children, condition):
        span = self.range(cursor)
        if self.text(cursor) in ("true", "false") and not condition:
            change = f"the contrary of {self.marked(span)}"
            self.add(span, ["(", span, " != jm::On({id}))"], "literal", change)

    def visit_call_expr(self, cursor, children, condition):
        arguments = [argument for argument in cursor.get_arguments() if argument is not None]
        text = self.text(cursor)
        if match := re.match(r"std::(min|max)\b\s*(<[\w:]+>)?\s*\(", text):
            begin = cursor.extent.start.offset
            function = match.group(1)
            if len(arguments) == 2:
                first = self.range(arguments[0])
                head = f"jm::{function.capitalize()}{match.group(2) or ''}({{id}}, "
                rest = (first[0], cursor.extent.end.offset)
                if self.source.text(begin, first[0]).endswith("("):
                    self.add(
                        (begin, rest[1]), [head, rest], "minmax", f"{short(text)}: std::{function} becomes the other"
                    )
            return
        if cursor.spelling.startswith("operator"):
            if cursor.spelling in ("operator==", "operator!=", "operator<") and not condition:
                span = self.range(cursor)
                parts = ["(jm::On({id}) != static_cast<bool>(", span, "))"]
                self.add(span, parts, "condition", f"negate {short(text)}")
            return
        self.swap(arguments, text)

    def visit_init_list_expr(self, cursor, children, condition):
        self.swap(children, self.text(cursor))

    def swap(self, arguments, call):
        """Swaps neighbours of the same type."""

        def name(cursor):
            spelling = cursor.type.get_canonical().spelling.rstrip("& ")
            return spelling if "*" in spelling else spelling.replace("const ", "")

        for first, second in itertools.pairwise(arguments):
            if {first.kind, second.kind} & {CursorKind.LAMBDA_EXPR, CursorKind.INIT_LIST_EXPR}:
                continue
            texts = [one_line(self.text(argument)) for argument in (first, second)]
            if any(text and text.startswith("{") for text in texts):
                continue
            if name(first) != name(second) or "char[" in name(first) or not all(texts) or texts[0] == texts[1]:
                continue
            begin, end = self.range(first)[0], self.range(second)[1]
            if self.range(first)[1] > self.range(second)[0]:
                continue
            # One switch in two places: the edit spans both and keeps the comma between them.
            comma = (self.range(first)[1], self.range(second)[0])
            parts = [f"(jm::On({{id}}) ? ({texts[1]}) : (", self.range(first), "))", comma]
            parts += [f"(jm::On({{id}}) ? ({texts[0]}) : (", self.range(second), "))"]
            change = f"swap {short(texts[0])} and {short(texts[1])} in {short(call)}"
            self.add((begin, end), parts, "swap", change)


def read(units, wanted, definitions=('JAXCOMM_CUDA_ARCHITECTURES=""',)):
    """{path: Source} of the files in `wanted` that the translation units `units` include, with all edits."""
    arguments = ["-x", "c++", "-std=c++17", *(f"-D{definition}" for definition in definitions)]
    for folder in include_folders():
        arguments += ["-isystem", folder]
    index = cindex.Index.create()
    sources = {}
    resolve = functools.cache(lambda name: str(pathlib.Path(name).resolve()))
    for unit in units:
        if wanted <= sources.keys():
            break
        options = cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD
        parsed = index.parse(str(unit), args=arguments, options=options)
        new, macros = {}, {}
        for cursor in parsed.cursor.get_children():
            file = cursor.extent.start.file
            if file is None or resolve(file.name) not in wanted:
                continue
            if cursor.kind is CursorKind.MACRO_INSTANTIATION:
                macros.setdefault(file.name, []).append((cursor.extent.start.offset, cursor.extent.end.offset))
            elif resolve(file.name) not in sources and not cursor.kind.is_preprocessing():
                new.setdefault(file.name, []).append(cursor)
        for name, cursors in new.items():
            source = Source(name)
            source.macros = macros.get(name, [])
            walker = Walker(source)
            for cursor in cursors:
                walker.walk(cursor)
            source.path = resolve(name)
            sources[source.path] = source
    return sources
