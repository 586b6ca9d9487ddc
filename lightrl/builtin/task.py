"""Two-digit addition, the task that a fresh installation trains on, and the recipe of its model. Needs no torch.

A problem is a dictionary of strings.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Literal

from lightrl.seeding import mix_seed

NUM_HELDOUT = 512
_SMALLEST, _LARGEST = 10, 99
_SPLIT_SEED, _ERROR_SEED = 7, 8
_LARGEST_ERROR = 20


def train_problems() -> list[dict[str, str]]:
    """Returns the 7,588 sums to train on, in a fixed random order."""
    return [_problem(left, right) for left, right in _split()[0]]


def heldout_problems() -> list[dict[str, str]]:
    """Returns the 512 held-out sums, which are not trained on in either order of their terms."""
    return [_problem(left, right) for left, right in _split()[1]]


def with_responses(problems: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the problems with the right answer as the response to imitate."""
    return [{"prompt": problem["prompt"], "response": problem["answer"]} for problem in problems]


def with_pairs(problems: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the problems with the right answer as chosen, and an answer that is off by 1 to 20 as rejected."""
    return [
        {"prompt": problem["prompt"], "chosen": problem["answer"], "rejected": _wrong_answer(problem)}
        for problem in problems
    ]


def _wrong_answer(problem: dict[str, str]) -> str:
    draw = mix_seed(_ERROR_SEED, *problem["prompt"].encode()) % (2 * _LARGEST_ERROR)
    error = draw - _LARGEST_ERROR if draw < _LARGEST_ERROR else draw - _LARGEST_ERROR + 1
    return str(int(problem["answer"]) + error)


def _problem(left: int, right: int) -> dict[str, str]:
    return {"prompt": f"{left}+{right}=", "answer": str(left + right)}


@lru_cache(maxsize=1)
def _split() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Splits all pairs of terms into (train, held out). 37+48 and 48+37 are on the same side, so no answer leaks."""
    terms = range(_SMALLEST, _LARGEST + 1)
    shuffled = sorted(product(terms, terms), key=lambda pair: mix_seed(_SPLIT_SEED, *pair))
    rising = [(left, right) for left, right in shuffled if left < right][: NUM_HELDOUT // 2]
    heldout = set(rising) | {(right, left) for left, right in rising}
    return [pair for pair in shuffled if pair not in heldout], [pair for pair in shuffled if pair in heldout]


BUILTIN_TASKS: dict[str, Callable[[], list[dict[str, str]]]] = {
    "builtin:addition": train_problems,
    "builtin:addition-heldout": heldout_problems,
    "builtin:addition-answers": lambda: with_responses(train_problems()),
    "builtin:addition-answers-heldout": lambda: with_responses(heldout_problems()),
    "builtin:addition-pairs": lambda: with_pairs(train_problems()),
    "builtin:addition-pairs-heldout": lambda: with_pairs(heldout_problems()),
}
HELD_OUT = {name: f"{name}-heldout" for name in BUILTIN_TASKS if not name.endswith("-heldout")}


# ---- The model -------------------------------------------------------------------------------------------------------

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = (PAD, EOS, *"0123456789+=")
MAX_TOKENS = 512
_EXPECTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of supervised training that ends at a given accuracy on the held-out sums."""

    learning_rate: float  # falls linearly to a tenth over max_steps
    max_steps: int
    steps_per_check: int
    wrong_share: float  # share of the sums that get a wrong answer
    stop_accuracy: float  # expected share of samples at temperature 1 that are right
    stop_when: Literal["above", "below"]

    def is_over(self, accuracy: float) -> bool:
        """Returns whether the accuracy ends the phase."""
        return accuracy >= self.stop_accuracy if self.stop_when == "above" else accuracy <= self.stop_accuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that the weights depend on; a hash of it names the cached folder."""

    hidden_size: int = 96
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32  # the smallest that vLLM accepts on a CPU
    initializer_range: float = 0.06
    seed: int = 0
    batch_size: int = 128
    warmup_steps: int = 20
    largest_error: int = 20  # a wrong answer is off by 1 to this
    learn: Phase = Phase(
        learning_rate=7e-3, max_steps=450, steps_per_check=25, wrong_share=0.0, stop_accuracy=0.97, stop_when="above"
    )
    # Gentle and short: at ten times this rate the sums are forgotten, and rewards cannot bring them back.
    blur: Phase = Phase(
        learning_rate=3e-4, max_steps=400, steps_per_check=5, wrong_share=0.9, stop_accuracy=0.2, stop_when="below"
    )
    code_revision: int = 1  # increase it when the code of model.py changes what the recipe makes

    def fingerprint(self) -> str:
        """Returns a short hash of the recipe, the vocabulary and the context length."""
        written = json.dumps([asdict(self), VOCABULARY, MAX_TOKENS], sort_keys=True)
        return hashlib.sha256(written.encode()).hexdigest()[:12]


RECIPE = Recipe()


def cached_model() -> Path | None:
    """Returns the folder of the built-in model if model.py has made it already."""
    folder = model_folder()
    return folder if is_made(folder) else None


def model_folder(cache_dir: Path | None = None) -> Path:
    """Returns the folder of the built-in model, whether or not it exists; without cache_dir it is in $LIGHTRL_CACHE."""
    return (cache_dir or cache_folder()) / f"addition-{RECIPE.fingerprint()}"


def cache_folder() -> Path:
    """Returns the folder for what lightrl makes once and keeps: $LIGHTRL_CACHE, or else ~/.cache/lightrl."""
    return Path(os.environ.get("LIGHTRL_CACHE") or "~/.cache/lightrl").expanduser()


def is_made(folder: Path) -> bool:
    """Returns whether the folder of a model is complete."""
    return all((folder / name).is_file() for name in _EXPECTED_FILES)
