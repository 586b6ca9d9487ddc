"""What importing loads: nothing that is not needed, no optional package, and few others."""

from __future__ import annotations

import ast
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightrl
from lightrl.testing import run_program

OPTIONAL = ("datasets", "deepspeed", "math_verify", "megatron", "peft", "pyarrow", "sglang", "vllm")
# Packages that the public names import. Each new one makes every start of a process slower.
THIRD_PARTY = [
    "easydict",
    "huggingface_hub",
    "numpy",
    "rich",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "yaml",
]
PUBLIC_NAMES = [
    "DPOConfig",
    "DPOTrainer",
    "EngineClient",
    "EngineStatus",
    "Environment",
    "Episode",
    "Experience",
    "GRPOConfig",
    "GRPOTrainer",
    "InferenceEngine",
    "PPOConfig",
    "PPOTrainer",
    "Prompt",
    "RMConfig",
    "RMTrainer",
    "SFTConfig",
    "SFTTrainer",
    "Sample",
    "SamplingParams",
    "StrategyBase",
    "Turn",
    "Workflow",
    "__version__",
    "create_strategy",
    "is_actor",
]


def run_python(code: str) -> Any:
    """What a fresh process without a GPU prints in its last line, read as JSON."""
    output = run_program([sys.executable, "-c", code], timeout_s=240, env={"CUDA_VISIBLE_DEVICES": ""})
    return json.loads(output.strip().splitlines()[-1])


def test_the_public_names_are_pinned() -> None:
    assert lightrl.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(lightrl, name) is not None
    assert name in dir(lightrl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'lightrl' has no attribute 'GRPOTrianer'"):
        _ = lightrl.GRPOTrianer


def test_the_package_and_its_config_import_no_torch() -> None:
    loaded = run_python(
        "import json, sys, lightrl, lightrl.config, lightrl.imports\n"
        "lightrl.GRPOConfig, lightrl.__version__\n"
        "print(json.dumps([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]))"
    )
    assert loaded == []


# Each module is imported in a fork of its own, before any other of lightrl: a cycle that only one order of imports
# hides would show. What all of them need is loaded once, before the forks.
IMPORT_EACH = """
import json, os, sys
import torch, transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM
before = {name for name in OPTIONAL if name in sys.modules}
failures = {}
for module in MODULES:
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            __import__(module)
            problem = ", ".join(sorted({name for name in OPTIONAL if name in sys.modules} - before))
        except BaseException as error:
            problem = repr(error)
        os.write(write_end, problem.encode()[:4000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        problem = pipe.read()
    os.waitpid(child, 0)
    if problem:
        failures[module] = problem
print(json.dumps(failures))
"""


@pytest.mark.long
def test_every_module_imports_first_and_loads_no_optional_package() -> None:
    modules = sorted(found.name for found in pkgutil.walk_packages(lightrl.__path__, "lightrl."))
    assert len(modules) > 40
    assert run_python(f"OPTIONAL = {OPTIONAL!r}\nMODULES = {modules!r}\n{IMPORT_EACH}") == {}


def test_the_public_names_import_no_package_but_these() -> None:
    optional, files = run_python(
        f"import json, sys, lightrl\nOPTIONAL = {OPTIONAL!r}\n"
        "public = [getattr(lightrl, name) for name in lightrl.__all__]\n"
        "files = [module.__file__ for name, module in sys.modules.items() if name.split('.')[0] == 'lightrl']\n"
        "print(json.dumps([[name for name in OPTIONAL if name in sys.modules], files]))"
    )
    assert optional == []
    assert len(files) > 100
    packages = {name.partition(".")[0] for file in files for name in imported_at_once(Path(file))}
    assert sorted(packages - {"lightrl", *sys.stdlib_module_names}) == THIRD_PARTY


def imported_at_once(path: Path) -> Iterator[str]:
    """Yields the modules that the import of a file imports: those outside functions and TYPE_CHECKING."""
    statements: list[ast.AST] = [ast.parse(path.read_text())]
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            statements += ast.iter_child_nodes(node)
