"""Small mistakes that a programmer could make, made on purpose in a module's text.

Each mutant differs from the module in one place. Text that only people read (docstrings,
annotations) and declarations without behaviour are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

COMPARISONS: dict[type[ast.cmpop], ast.cmpop] = {
    ast.Eq: ast.NotEq(),
    ast.NotEq: ast.Eq(),
    ast.Lt: ast.LtE(),
    ast.LtE: ast.Lt(),
    ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(),
    ast.In: ast.NotIn(),
    ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(),
    ast.IsNot: ast.Is(),
}
OPERATORS: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(),
    ast.Sub: ast.Add(),
    ast.Mult: ast.FloorDiv(),
    ast.FloorDiv: ast.Mult(),
    ast.Mod: ast.FloorDiv(),
    ast.LShift: ast.RShift(),
    ast.RShift: ast.LShift(),
    ast.BitAnd: ast.BitOr(),
    ast.BitOr: ast.BitAnd(),
}


class Mutant(NamedTuple):
    """One changed place of a module.

    Attributes:
        line: Its line, from 1.
        operator: The kind of change.
        before: The text there.
        after: The text in its place.
        start: Where it begins, in bytes of the module's text.
        end: Where it ends.
    """

    line: int
    operator: str
    before: str
    after: str
    start: int
    end: int

    @property
    def key(self) -> str:
        """A name that stays the same as long as the module does."""
        return f"{self.start}:{self.end}:{self.operator}:{self.after}"

    def is_python(self, source: bytes) -> bool:
        """Return whether the module's text with this change can be compiled."""
        try:
            compile(self.apply(source), "mutant", "exec")
        except SyntaxError:
            return False
        return True

    def apply(self, source: bytes) -> bytes:
        """Return the module's text with this change."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def list_mutants(source: bytes) -> list[Mutant]:
    """Return all mutants of a module, in the order of their places; some may be no Python."""
    starts = [0]
    for line in source.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    mutants = []
    for node, operator, after in _visit(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = source[start:end].decode()
        text = f"({after})" if isinstance(node, ast.expr) and operator != "constant" else after
        mutants.append(Mutant(node.lineno, operator, before, text, start, end))
    return sorted(set(mutants), key=lambda mutant: (mutant.start, mutant.end, mutant.after))


def _visit(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield nodes, each with an operator and the text to put in its place."""
    skipped = set(_skip(tree))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.expr):
            yield from ((node, operator, after) for operator, after in _change_expression(node))
        elif isinstance(node, ast.stmt):
            yield from _change_statement(node)


def _skip(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield the nodes that have no behaviour: annotations, docstrings, declarations of types."""
    for node in ast.walk(tree):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            parts += [node.returns, *node.decorator_list]
            parts += [
                argument.annotation
                for argument in ast.walk(node.args)
                if isinstance(argument, ast.arg)
            ]
        elif isinstance(node, ast.AnnAssign):
            parts += [node.annotation]
        elif isinstance(node, ast.ClassDef):
            parts += [*node.bases, *node.decorator_list]
        elif (
            (isinstance(node, ast.JoinedStr | ast.Subscript) and _is_plain(node))
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
            or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("Callback"))
        ):
            parts += [node]
        elif isinstance(node, ast.JoinedStr):
            parts += [part for part in node.values if isinstance(part, ast.Constant)]
            parts += [
                part.format_spec for part in node.values if isinstance(part, ast.FormattedValue)
            ]
        for part in parts:
            if part is not None:
                yield from ast.walk(part)


def _is_plain(node: ast.AST) -> bool:
    """Return whether an expression is a type such as ``Literal["a"]``."""
    return isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "Callable")


def _change_expression(node: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Compare):
        for index, comparison in enumerate(node.ops):
            ops = [*node.ops]
            ops[index] = COMPARISONS[type(comparison)]
            yield "comparison", ast.unparse(ast.Compare(node.left, ops, node.comparators))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and/or", ast.unparse(ast.BoolOp(other, node.values))
        for index in range(len(node.values)):
            rest = node.values[:index] + node.values[index + 1 :]
            yield (
                "drop a condition",
                " and ".join(f"({ast.unparse(part)})" for part in rest)
                if isinstance(node.op, ast.And)
                else " or ".join(f"({ast.unparse(part)})" for part in rest),
            )
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "drop not", ast.unparse(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)], node.right))
    elif isinstance(node, ast.IfExp):
        yield "negate", ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
    elif isinstance(node, ast.Constant):
        yield from _change_constant(node)


def _change_constant(node: ast.Constant) -> Iterator[tuple[str, str]]:
    value = node.value
    if isinstance(value, bool):
        yield "constant", repr(not value)
    elif isinstance(value, int):
        yield "constant", repr(value + 1)
        if value > 0:
            yield "constant", f"({value - 1})"
    elif isinstance(value, str | bytes):
        yield "constant", repr(value + (b"X" if isinstance(value, bytes) else "X"))


def _change_statement(node: ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Yield | ast.YieldFrom):
        yield node, "drop a call", "pass"
    elif isinstance(node, ast.Expr):
        yield node, "drop a yield", "pass"
    elif isinstance(node, ast.Raise):
        yield node, "drop a raise", "pass"
    elif isinstance(node, ast.AugAssign | ast.Delete):
        yield node, "drop a statement", "pass"
    elif isinstance(node, ast.Return) and node.value is not None:
        if ast.unparse(node.value) != "None":
            yield node, "return None", "return None"
    elif isinstance(node, ast.Continue):
        yield node, "continue", "break"
    elif isinstance(node, ast.Break):
        yield node, "break", "pass"
    elif isinstance(node, ast.If | ast.While):
        yield node.test, "negate", f"not ({ast.unparse(node.test)})"
