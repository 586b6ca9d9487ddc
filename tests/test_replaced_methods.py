"""No code of the package replaces a method of another object: what looks on is an Observer, what differs a subclass."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "lightrl"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OF_MODULES = {"forward", "train", "eval", "get_decoder"}  # methods of torch and transformers that some replace
PATCHES = {  # modules of other libraries, which offer no subclass or hook for it
    "engines/native/adapted.py": "layers of a loaded model, for requests with another adapter",
    "exact/policy.py": "layers with an adapter, which the engine merges before the product",
    "models/per_sequence.py": "decoders whose layers carry a state, which run each sequence apart",
    "models/policy.py": "modules whose randomness is off whatever train() says",
    "strategy/computation.py": "models under autocast, and blocks that are compiled, as torch has it",
    "strategy/layout/zero.py": "a model whose output DeepSpeed's hooks must see as a tuple",
}


def methods_of(trees: list[ast.Module]) -> set[str]:
    """Returns the names of all methods; a property is none."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    functions = [item for kind in classes for item in kind.body if isinstance(item, FUNCTIONS)]
    return {
        item.name
        for item in functions
        if not any("property" in ast.unparse(one) or "setter" in ast.unparse(one) for one in item.decorator_list)
    } | OF_MODULES


def assignments(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the targets of assignments with their values, those of tuples one by one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    yield from zip(target.elts, node.value.elts, strict=False)
                else:
                    yield target, node.value


def is_function(value: ast.expr, target: ast.expr, methods: set[str], functions: set[str]) -> bool:
    """Returns whether a value is plainly a function; methods, functions: the names of those in the file."""
    if isinstance(value, ast.Call):
        maker = ast.unparse(value.func).rpartition(".")[2]
        wraps = ast.unparse(target) in [ast.unparse(item) for item in value.args]
        return wraps or maker in ("partial", "MethodType") or isinstance(value.func, ast.Call)
    if isinstance(value, ast.Attribute):
        return value.attr in methods
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)


def replaced(tree: ast.Module, methods: set[str]) -> list[str]:
    """Returns the methods of other objects that a file replaces, as it writes them."""
    own = methods_of([tree])
    functions = {
        item.name
        for node in ast.walk(tree)
        if not isinstance(node, ast.ClassDef)
        for item in ast.iter_child_nodes(node)
        if isinstance(item, FUNCTIONS)
    }
    return [
        ast.unparse(target)
        for target, value in assignments(tree)
        if isinstance(target, ast.Attribute)
        and ast.unparse(target.value) not in ("self", "cls")
        and target.attr in methods
        and is_function(value, target, own, functions)
    ]


def test_no_file_replaces_a_method_of_another_object() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    methods = methods_of([*trees.values()])
    found = {path.relative_to(PACKAGE).as_posix(): replaced(tree, methods) for path, tree in trees.items()}
    assert {path: names for path, names in found.items() if names and path not in PATCHES} == {}
    assert [path for path in PATCHES if not found[path]] == []  # each exception is needed


def test_what_counts_as_a_replaced_method() -> None:
    code = """
class Watch:
    def look(self): ...
    def begin(self): self.look = self.begin  # its own

def attach(trainer, watch, step):
    def observed(): ...
    trainer.step, trainer.total = observed, 3
    trainer.phase = spanned(trainer.phase, watch)
    trainer.fit = partial(observed, trainer)
    trainer.rewards.run = lambda: None
    trainer.look = watch.look
    trainer.on_step = observed  # a hook: no class has a method of this name
    trainer.count = watch.total  # data, though another class has such a method
"""
    methods = {"step", "phase", "fit", "run", "look", "count", "total"}
    names = ["trainer.step", "trainer.phase", "trainer.fit", "trainer.rewards.run", "trainer.look"]
    assert replaced(ast.parse(code), methods) == names
    assert {"look", "begin", "forward"} <= methods_of([ast.parse(code)])
