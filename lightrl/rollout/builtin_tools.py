"""Tools that every run has. Their docstrings are what the policy reads about them."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from lightrl.cores import cores_of_rank
from lightrl.rewards.sandbox import SandboxLimits, run_python
from lightrl.rollout.tool_calls import CallError

_MAX_POWER = 10_000  # bits of a result, so that 9**9**9 ends
# Causes: no Python, a division by zero, a float that is too large, % of a complex number, too deep.
_EXPRESSION_ERRORS = (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError)
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def calculator(expression: str) -> str:
    """Calculates an expression of numbers with + - * / // % ** and parentheses.

    Args:
        expression: What to calculate, such as (12 + 3) * 4.
    """
    try:
        return str(_value(ast.parse(str(expression).strip(), mode="eval").body))
    except _EXPRESSION_ERRORS as error:
        raise CallError(f"{type(error).__name__}: {error}") from error


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers, + - * / // % ** and parentheses can be calculated")


def _power(base: Any, exponent: Any) -> Any:
    if abs(base) > 1 and abs(exponent) * math.log2(abs(base)) > _MAX_POWER:
        raise ValueError(f"{base}**{exponent} is too large")
    return base**exponent


def python(code: str) -> str:
    """Runs a Python program in a sandbox, without network, and returns what it prints.

    Args:
        code: The program. Print what you want to know.
    """
    result = run_python(code, limits=SandboxLimits())
    if result.timed_out:
        return f"{result.stdout}error: the program was stopped at its time limit"
    return result.stdout + (result.stderr if result.exit_code else "")


# More programs at a time than cores would make each other time out.
python.max_concurrency = cores_of_rank()  # type: ignore[attr-defined]
