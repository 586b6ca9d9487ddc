"""The parts that a trainer starts from; `open_run` finds strategy, folder, checkpoint, data and tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightrl.builtin.model import builtin_model_path
from lightrl.builtin.task import cached_model
from lightrl.comm import known_world
from lightrl.config import BUILTIN_MODEL, RolloutConfig, template_arguments
from lightrl.data.chat_arguments import set_template_arguments, set_template_file
from lightrl.data.media import PromptEncoder
from lightrl.data.prompts import held_out_of, load_records
from lightrl.models.fixed_rope import describe_fixed, fix_frequencies, fixed_length
from lightrl.models.lora import add_adapters
from lightrl.models.multimodal import FAMILIES, MediaProcessor
from lightrl.models.packed_attention import varies_with_length
from lightrl.models.policy import (
    Policy,
    check_model_folder,
    load_config,
    load_policy,
    load_tokenizer,
    needs_score_check,
    stated_context,
)
from lightrl.models.routing_replay import attach_replay
from lightrl.models.score_check import check_scores
from lightrl.rollout.workflow import Workflow, load_workflow
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.strategy.own_class import ranks_apart
from lightrl.strategy.serving.adapter_source import check_adapters, serve_as_configured
from lightrl.trainers.observer import Observer
from lightrl.trainers.run_folder import RunFolder, TrainerConfig, open_folder
from lightrl.trainers.sound_checkpoint import newest_sound

_COMPANIONS = ("teacher_model", "critic_model")  # options that name further models of trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything that a trainer needs before it builds its models. It is the same on every rank."""

    config: Any  # the trainer's own kind of RolloutConfig or OfflineConfig
    strategy: StrategyBase
    folder: RunFolder
    checkpoint: Path | None  # to continue from; None: start at step 0
    model_path: str  # a folder or a Hugging Face name
    context: int  # most tokens, prompt and response together, that the model takes
    vocab_size: int  # of the model: a tokenizer may have tokens beyond it
    tokenizer: PreTrainedTokenizerBase
    media: MediaProcessor | None  # None: the model takes only text
    encoder: PromptEncoder | None  # turns prompts with images into model inputs; None without media
    train_records: Sequence[Any]  # the lines of --train_data
    eval_records: Sequence[Any]
    workflow: Workflow | None = None  # makes the samples; None: one response to each prompt
    longest_sequences: list[int] = field(default_factory=list)  # tokens, one per data set read so far
    observers: list[Observer] = field(default_factory=list)  # of the trainer


def open_run(config: TrainerConfig, *, kind: str, strategy: StrategyBase | None = None) -> RunContext:
    """Joins the world, then checks folder, data and model files in this order, before any weights are loaded.

    Args:
        kind: the trainer's name, used for a new folder under runs/.
        strategy: the caller's own strategy; None creates the one that the config names.
    """
    workflow = load_workflow(config.rollout) if isinstance(config, RolloutConfig) and config.rollout.workflow else None
    strategy = strategy or create_strategy(config)
    strategy.setup_distributed()
    if strategy.comm.world == 1 < known_world():
        raise ranks_apart(strategy, known_world())
    comm, remote_code = strategy.comm, config.trust_remote_code
    folder, checkpoint = open_folder(config, kind, comm)
    checkpoint = checkpoint and newest_sound(checkpoint, comm, resume=config.resume)
    with comm.phase("set-up", local=True):
        train_records = load_records(config.train_data, stream=config.data.stream)
        eval_data = config.eval_data or held_out_of(config.train_data)
        eval_records = load_records(eval_data) if eval_data else []
    model_path = _find_model(config, strategy, () if kind == "rollout" else _COMPANIONS)
    with comm.phase("set-up", local=True):
        model_config = load_config(model_path, trust_remote_code=remote_code)
        strategy.check_model_config(model_config)
        if config.lora.is_on:
            check_adapters(config, model_path)
        tokenizer = load_tokenizer(model_path, trust_remote_code=remote_code)
        takes_images = model_config.model_type in FAMILIES
        media = MediaProcessor.load(model_path, trust_remote_code=remote_code) if takes_images else None
        if config.data.chat_template_args or config.data.chat_template_file:
            _set_template(config, tokenizer, media)
    strategy.tokenizer, strategy.media = tokenizer, media
    return RunContext(
        config=config,
        strategy=strategy,
        folder=folder,
        checkpoint=checkpoint,
        model_path=model_path,
        context=stated_context(model_config.get_text_config()),
        vocab_size=getattr(model_config.get_text_config(), "vocab_size", None) or _no_vocabulary(model_path),
        tokenizer=tokenizer,
        media=media,
        encoder=PromptEncoder(media) if media is not None else None,
        train_records=train_records,
        eval_records=eval_records,
        workflow=workflow,
    )


def _set_template(config: TrainerConfig, tokenizer: PreTrainedTokenizerBase, media: MediaProcessor | None) -> None:
    for renderer in (tokenizer, media.processor) if media else (tokenizer,):
        if config.data.chat_template_file:
            set_template_file(renderer, config.data.chat_template_file)
        if config.data.chat_template_args:
            set_template_arguments(renderer, template_arguments(config.data))


def _no_vocabulary(model: str) -> NoReturn:
    raise ValueError(
        f"--model {model}: its config states no vocab_size, the number of its tokens. Write it into its config.json."
    )


def _find_model(config: TrainerConfig, strategy: StrategyBase, others: Sequence[str]) -> str:
    """Returns the path or name to load. Rank 0 makes the built-in model while the others wait."""
    if config.model != BUILTIN_MODEL:
        return _checked_model(config, strategy, others)
    with strategy.comm.phase("building the built-in model", local=True):
        path = str(cached_model() or builtin_model_path(on_progress=strategy.print)) if strategy.comm.is_main else ""
    return strategy.comm.broadcast_object(path)


def _checked_model(config: TrainerConfig, strategy: StrategyBase, others: Sequence[str]) -> str:
    """Checks the other models of this rank too, since they are loaded only after this one, which may take minutes."""
    with strategy.comm.phase("set-up", local=True):
        check_model_folder(config.model)
        for option in others:
            if path := getattr(config, option, ""):
                check_model_folder(path, f"--{option}")
    return config.model


# ---- Models ----------------------------------------------------------------------------------------------------------


def load_start_policy(run: RunContext, *, is_reference: bool = False) -> Policy:
    """Loads the model that the run starts from, with its adapters if it is to be trained; it is not yet prepared."""
    materialize, trusts = run.strategy.materializes_weights, run.config.trust_remote_code
    policy = load_policy(run.model_path, materialize=materialize, trust_remote_code=trusts, is_reference=is_reference)
    if varies_with_length(policy.hf.config):
        fix_for_run(run, policy)
    if (run.config.lora.is_on or run.config.routing.is_on) and not is_reference:
        _attach_options(run, policy)
    if materialize and not is_reference and needs_score_check(policy.hf):
        check_scores(policy, next(policy.parameters()).device)
    return policy


def _attach_options(run: RunContext, policy: Policy) -> None:
    """Adds adapters and the replay of routers, if the options ask for them."""
    if run.config.lora.is_on:
        add_adapters(policy.hf, run.config.lora, seed=run.config.seed)
        serve_as_configured(run.strategy, run.config, policy.hf)
    if run.config.routing.is_on:
        attach_replay(policy, keeps_logits=run.config.routing.has_losses)


def fix_for_run(run: RunContext, model: nn.Module) -> None:
    """Fixes rotary frequencies that vary with the length, if any, at those of the longest sequence in the data."""
    if run.longest_sequences and fixed_length(model) is not None:
        fix_frequencies(model, max(run.longest_sequences))
        run.strategy.print(f"{type(model).__name__}: {describe_fixed(model)}.")
