"""Pure: the mutants of a module, each a small change of its source that a test is to notice.

A mutant changes a comparison, a boolean operator or one of its operands, a number, an argument, a returned value or a
statement. Text, assertions, log lines and the numbers that name a limit or a time at module level are left alone.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from dataclasses import dataclass, replace

_COMPARISONS: dict[type[ast.cmpop], list[type[ast.cmpop]]] = {
    ast.Eq: [ast.NotEq],
    ast.NotEq: [ast.Eq],
    ast.Lt: [ast.LtE, ast.GtE],
    ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.LtE],
    ast.GtE: [ast.Gt, ast.Lt],
    ast.Is: [ast.IsNot],
    ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn],
    ast.NotIn: [ast.In],
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_LOGGERS = ("log", "logger")
_SKIPPED_FUNCTIONS = ("validate", "diagram", "__repr__", "__str__")  # for tests and for people


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: of the module, below the repository's root.
        place: the function, with its class.
        before, after: the source that is replaced, and what replaces it, in one line each.
        start, end: which characters of the source are replaced by ``text``.
        number: the how-manieth change of these words it is in its function.
    """

    path: str
    place: str
    before: str
    after: str
    start: int
    end: int
    text: str
    number: int = 0

    @property
    def name(self) -> str:
        """A name that stays the same while the function does."""
        return f"{self.path}::{self.place}: {self.before} -> {self.after}" + f" #{self.number + 1}" * bool(self.number)

    def apply(self, source: str) -> str:
        """The source of the module with this change."""
        return source[: self.start] + self.text + source[self.end :]


def mutants(path: str, source: str) -> list[Mutant]:
    """All mutants of this source, in its order."""
    found = _Finder(path, source).found
    found.sort(key=lambda mutant: (mutant.start, mutant.end))
    counts: Counter[str] = Counter()
    numbered = []
    for mutant in found:
        numbered.append(replace(mutant, number=counts[mutant.name]))
        counts[mutant.name] += 1
    return numbered


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.found: list[Mutant] = []
        self._path = path
        self._source = source
        self._place: list[str] = []
        self._in_class_body = False  # where numbers are defaults
        # Columns of the parser count bytes.
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._text_lines = source.splitlines(keepends=True)
        self.visit(ast.parse(source))

    def _offset(self, line: int, column: int) -> int:
        return self._lines[line - 1] + len(self._text_lines[line - 1].encode()[:column].decode())

    def _add(self, node: ast.AST, text: str) -> None:
        """Have this node replaced by this text."""
        if not self._place:
            return
        assert isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno is not None
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno, node.end_col_offset or 0)
        before = " ".join(self._source[start:end].split())
        after = " ".join(text.split())
        if before != after:
            wrapped = f"({text})" if isinstance(node, ast.expr) else text
            self.found.append(Mutant(self._path, ".".join(self._place), before, after, start, end, wrapped))

    def _replace(self, node: ast.expr, changed: ast.expr) -> None:
        self._add(node, ast.unparse(changed))

    # --- where ----------------------------------------------------------------------------------------------------

    def _enter(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        if node.name in _SKIPPED_FUNCTIONS:
            return
        outer, self._in_class_body = self._in_class_body, isinstance(node, ast.ClassDef)
        self._place.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._place.pop()
        self._in_class_body = outer

    visit_FunctionDef = visit_ClassDef = _enter

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave it alone: it is for readers."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave text alone."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
            self._delete(node, node.target)

    # --- statements -----------------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring
        if isinstance(node.value, ast.Call) and _is_log(node.value):
            return
        self._add(node, "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self._delete(node, node.targets[0])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._add(node, "pass")

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            self._add(node, "pass")
        elif not (isinstance(node.value, ast.Constant) and node.value.value is None):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, (bool, int)):
                pass  # its value is changed anyhow
            else:
                self._add(node, "return None")
        self.generic_visit(node)

    def _delete(self, node: ast.stmt, target: ast.expr) -> None:
        """Leave out an assignment to something that has a value without it."""
        targets = target.elts if isinstance(target, ast.Tuple) else [target]
        initial = bool(self._place) and self._place[-1] == "__init__"
        if not initial and all(isinstance(each, (ast.Attribute, ast.Subscript)) for each in targets):
            self._add(node, "pass")

    # --- expressions ----------------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        for number, operator in enumerate(node.ops):
            for other in _COMPARISONS[type(operator)]:
                changed = copy.deepcopy(node)
                changed.ops[number] = other()
                self._replace(node, changed)
            if isinstance(operator, (ast.In, ast.NotIn)) and isinstance(node.comparators[number], (ast.Tuple, ast.Set)):
                self._drop_elements(node.comparators[number])
        self.generic_visit(node)

    def _drop_elements(self, literal: ast.expr) -> None:
        """Leave out each element of what is looked into."""
        assert isinstance(literal, (ast.Tuple, ast.Set))
        for number in range(len(literal.elts) if len(literal.elts) > 1 else 0):
            changed = copy.deepcopy(literal)
            del changed.elts[number]
            self._replace(literal, changed)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace(node, changed)
        for number in range(len(node.values)):
            left = [value for other, value in enumerate(node.values) if other != number]
            self._replace(node, left[0] if len(left) == 1 else ast.BoolOp(node.op, left))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
            self._replace(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if (other := _OPERATORS.get(type(node.op))) is not None and not _is_text(node):
            changed = copy.deepcopy(node)
            changed.op = other()
            self._replace(node, changed)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, (int, float)) and not self._in_class_body:
            self._add(node, repr(node.value + 1))

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.NamedExpr):
            self._add(test, f"not ({ast.unparse(test)})")
        elif isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            self._add(test, f"not {ast.unparse(test)}")

    def visit_Call(self, node: ast.Call) -> None:
        if _is_log(node):
            return
        for number, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                changed = copy.deepcopy(node)
                del changed.keywords[number]
                self._replace(node, changed)
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max") and len(node.args) > 1:
            for number in range(len(node.args)):
                left = [each for other, each in enumerate(node.args) if other != number]
                if len(left) == 1 and not isinstance(left[0], ast.Starred):
                    self._replace(node, left[0])
                elif len(left) > 1:
                    self._replace(node, ast.Call(node.func, left, node.keywords))
        self.generic_visit(node)


def _is_log(node: ast.Call) -> bool:
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
    return name in _LOGGERS


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)))
        for side in (node.left, node.right)
    )
