"""Calls of functions that a model wrote as Python. They are read, never run."""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from typing import Any


def json_text(value: object) -> str:
    """Arguments as JSON text; half a surrogate pair, which UTF-8 has not, stays an escape."""
    text = json.dumps(value, ensure_ascii=False)
    return text if encodable(text) else json.dumps(value)


def encodable(text: str) -> bool:
    """Whether UTF-8 can write it: it holds no half of a surrogate pair."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def python_calls(
    code: str, parameters: Mapping[str, Collection[str]]
) -> list[tuple[str, str]] | None:
    """The calls of a block of Python: `f(a=1)`, `print(f(a=1))`, `[f(1), g()]`, one or more a line.

    Nothing is run: arguments must be literals; JSON's true, false and null count as such.

    Args:
        parameters: of each function the names of its parameters, for arguments without a name.

    Returns:
        name and arguments as JSON text of each; None when the block is anything else.
    """
    try:
        tree = ast.parse(code.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: list[tuple[str, str]] = []
    for statement in tree.body:
        if isinstance(statement, ast.Assign | ast.Expr):
            value = statement.value
        else:
            return None
        if isinstance(value, ast.Call) and _name_of(value) == "print" and len(value.args) == 1:
            value = value.args[0]
        for one in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            call = _python_call(one, parameters)
            if call is None:
                return None
            calls.append(call)
    return calls or None


def _name_of(call: ast.Call) -> str | None:
    """The function's name; of a method, that behind the dot."""
    if isinstance(call.func, ast.Name):
        return call.func.id
    return call.func.attr if isinstance(call.func, ast.Attribute) else None


def _python_call(
    node: ast.expr, parameters: Mapping[str, Collection[str]]
) -> tuple[str, str] | None:
    name = _name_of(node) if isinstance(node, ast.Call) else None
    if name is None or name not in parameters or not isinstance(node, ast.Call):
        return None
    arguments: dict[str, Any] = {}
    names = list(parameters[name])
    if len(node.args) > len(names):
        return None
    try:
        for key, value in zip(names, node.args, strict=False):
            arguments[key] = _literal(value)
        for keyword in node.keywords:
            if keyword.arg is None:
                arguments.update(_literal(keyword.value))
            else:
                arguments[keyword.arg] = _literal(keyword.value)
        return name, json_text(arguments)
    except (ValueError, TypeError, RecursionError):
        return None


_CONSTANTS = {"true": True, "false": False, "null": None}


class _Constants(ast.NodeTransformer):
    """JSON's constants as Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in _CONSTANTS:
            return ast.Constant(_CONSTANTS[node.id])
        return node


def _literal(node: ast.expr) -> Any:
    """The value of a literal; ValueError when it is none."""
    return ast.literal_eval(_Constants().visit(node))
