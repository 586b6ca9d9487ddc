"""The model that a fresh installation trains: a small Qwen3 that half knows two-digit addition, made on the spot.

Like a pretrained model on a task that it was not tuned for, it is right now and then: it first learns the sums, and is
then taught wrong ones until a fifth of its samples is right. Because it once knew the sums, it learns quickly from
rewards.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lightrl.builtin import task
from lightrl.builtin.task import (
    EOS,
    MAX_TOKENS,
    PAD,
    VOCABULARY,
    Phase,
    Recipe,
    heldout_problems,
    is_made,
    model_folder,
    train_problems,
)

_TOKEN_IDS = {token: index for index, token in enumerate(VOCABULARY)}
_PAD_ID, _EOS_ID = _TOKEN_IDS[PAD], _TOKEN_IDS[EOS]
_NUM_ANSWER_TOKENS = 4  # three digits and the end token


def builtin_model_path(cache_dir: Path | None = None, on_progress: Callable[[str], None] | None = None) -> Path:
    """Returns the Hugging Face folder of the built-in model with its tokenizer; the first call makes it.

    Args:
        cache_dir: Folder that holds the model's folder. None: $LIGHTRL_CACHE if set, otherwise ~/.cache/lightrl.
        on_progress: Called with a line of text about every second while the model is made.
    """
    folder = model_folder(cache_dir)
    if is_made(folder):
        return folder
    _make_cache_dir(folder.parent)
    with _only_one_process(folder.parent / f"{folder.name}.lock"):
        if not is_made(folder):
            _publish(_write_unpublished(folder, task.RECIPE, on_progress or _ignore), folder)
    return folder


def tiny_model(seed: int = 0, **overrides: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Makes a random two-layer model and the built-in tokenizer in milliseconds; overrides set Qwen3Config fields."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    with _isolated_torch_state():
        model = _random_model(_model_config(**{**sizes, **overrides}), torch.Generator().manual_seed(seed))
    model.eval()
    return model, builtin_tokenizer()


def builtin_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer with one token per character and no unknown token: text outside the task is an error."""
    tokenizer = Tokenizer(WordLevel(_TOKEN_IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


# ---- The cache


def _make_cache_dir(cache_dir: Path) -> None:
    with suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
    if not (cache_dir.is_dir() and os.access(cache_dir, os.W_OK)):
        raise PermissionError(
            f"The folder for built-in models, {cache_dir}, cannot be written. Set LIGHTRL_CACHE to one that can."
        )


@contextmanager
def _only_one_process(lock_path: Path) -> Iterator[None]:
    """Keeps a second process from repeating the work of the first. _publish renames, so a race would be harmless."""
    with lock_path.open("w") as lock:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_unpublished(folder: Path, recipe: Recipe, on_progress: Callable[[str], None]) -> Path:
    model = _train(recipe, on_progress)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _save(model, unfinished)
        builtin_tokenizer().save_pretrained(unfinished)
        for path in (*unfinished.iterdir(), unfinished):
            _flush_to_disk(path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return unfinished


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Saves the model on any rank; of a process group, its own save_pretrained() writes on rank 0 alone."""
    model.config.architectures, model.config.dtype = [type(model).__name__], "float32"
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}  # tied ones once
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _publish(finished: Path, folder: Path) -> None:
    with suppress(OSError):  # some file systems have no modes
        finished.chmod(0o755)  # mkdtemp and safetensors grant access to the owner alone, but a cache may be shared
        for path in finished.iterdir():
            path.chmod(0o644)
    if folder.exists() and not is_made(folder):
        shutil.rmtree(folder)
    try:
        finished.rename(folder)
    except OSError:
        shutil.rmtree(finished, ignore_errors=True)
        if not is_made(folder):  # otherwise another process has made the same model
            raise
    _flush_to_disk(folder.parent)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ignore(_: str) -> None:
    """Ignores a line of progress."""


# ---- The model


def _model_config(**sizes: Any) -> Qwen3Config:
    settings: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "max_position_embeddings": MAX_TOKENS,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "pad_token_id": _PAD_ID,
        "bos_token_id": None,
        "eos_token_id": _EOS_ID,
    }
    return Qwen3Config(**{**settings, **sizes})


def _random_model(config: Qwen3Config, generator: torch.Generator) -> PreTrainedModel:
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the weights of norms stay at one
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    return model


@contextmanager
def _isolated_torch_state() -> Iterator[None]:
    """Runs the body on one CPU thread, so that every machine adds in the same order, whatever mode the caller is in."""
    num_threads = torch.get_num_threads()
    default_dtype = torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        torch.set_num_threads(num_threads)
        torch.set_default_dtype(default_dtype)


# ---- The lessons


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    prompt_ids: Tensor  # [N, 6] int64
    values: Tensor  # [N] int64

    def __len__(self) -> int:
        return len(self.values)


def _sums(problems: list[dict[str, str]]) -> _Sums:
    return _Sums(
        prompt_ids=torch.tensor([[_TOKEN_IDS[char] for char in problem["prompt"]] for problem in problems]),
        values=torch.tensor([int(problem["answer"]) for problem in problems]),
    )


def _answer_table(largest: int) -> Tensor:
    """Returns a table, [largest + 1, 4] int64, whose row v is the answer v: its digits, the end token, and padding."""
    rows = [[*(_TOKEN_IDS[digit] for digit in str(value)), _EOS_ID] for value in range(largest + 1)]
    return torch.tensor([row + [_PAD_ID] * (_NUM_ANSWER_TOKENS - len(row)) for row in rows])


def _train(recipe: Recipe, on_progress: Callable[[str], None]) -> PreTrainedModel:
    with _isolated_torch_state():
        generator = torch.Generator().manual_seed(recipe.seed)
        config = _model_config(
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_hidden_layers,
            num_attention_heads=recipe.num_attention_heads,
            num_key_value_heads=recipe.num_key_value_heads,
            head_dim=recipe.head_dim,
            initializer_range=recipe.initializer_range,
        )
        model = _random_model(config, generator)
        for phase, doing in ((recipe.learn, "learning sums"), (recipe.blur, "unlearning most of them")):
            tell = partial(_tell, on_progress, f"making the built-in model: {doing}")
            _fit(model, recipe, phase, generator, tell)
    model.eval()
    return model


def _fit(
    model: PreTrainedModel,
    recipe: Recipe,
    phase: Phase,
    generator: torch.Generator,
    on_progress: Callable[[str], None],
) -> None:
    train, heldout = _sums(train_problems()), _sums(heldout_problems())
    answers = _answer_table(int(train.values.max()) + recipe.largest_error)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    batches = _shuffled_batches(len(train), recipe.batch_size, generator)
    for step in range(phase.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(phase, recipe.warmup_steps, step)
        rows = next(batches)
        values = _with_errors(train.values[rows], phase.wrong_share, recipe.largest_error, generator)
        nll, is_answer = _answer_nll(model, train.prompt_ids[rows], answers[values])
        (nll.sum() / is_answer.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % phase.steps_per_check == 0:
            accuracy = _sampled_accuracy(model, heldout, answers)
            on_progress(f"step {step + 1} of at most {phase.max_steps}, accuracy {accuracy:.2f}")
            if phase.is_over(accuracy):
                return


def _tell(on_progress: Callable[[str], None], doing: str, text: str) -> None:
    on_progress(f"{doing}, {text}")


def _learning_rate(phase: Phase, warmup_steps: int, step: int) -> float:
    return phase.learning_rate * min(1.0, (step + 1) / warmup_steps) * max(0.1, 1.0 - step / phase.max_steps)


def _shuffled_batches(num_rows: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    while True:
        shuffled = torch.randperm(num_rows, generator=generator)
        yield from shuffled[: num_rows - num_rows % batch_size].split(batch_size)


def _with_errors(values: Tensor, wrong_share: float, largest_error: int, generator: torch.Generator) -> Tensor:
    size = values.shape
    error = torch.randint(1, largest_error + 1, size, generator=generator)
    sign = torch.randint(0, 2, size, generator=generator) * 2 - 1
    is_wrong = torch.rand(size, generator=generator) < wrong_share
    return (values + error * sign * is_wrong).clamp(min=0)


def _answer_nll(model: PreTrainedModel, prompt_ids: Tensor, answer_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the NLL of each answer token (0 on padding) and the mask of answer tokens, [B, 4] each."""
    input_ids = torch.cat([prompt_ids, answer_ids[:, :-1]], dim=1)
    logits = model(input_ids=input_ids, logits_to_keep=_NUM_ANSWER_TOKENS, use_cache=False).logits
    is_answer = answer_ids != _PAD_ID
    nll = F.cross_entropy(logits.flatten(0, 1), answer_ids.flatten(), reduction="none").view_as(answer_ids)
    return nll * is_answer, is_answer


@torch.no_grad()
def _sampled_accuracy(model: PreTrainedModel, sums: _Sums, answers: Tensor) -> float:
    """Returns the expected accuracy of samples at temperature 1: the mean probability of the right answer."""
    nll, _ = _answer_nll(model, sums.prompt_ids, answers[sums.values])
    return float(nll.sum(dim=1).neg().exp().mean())
