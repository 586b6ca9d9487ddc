"""The program `lightrl export`: writes the model of a run, or of one of its checkpoints, as a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightrl.builtin.model import builtin_model_path
from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import (
    BUILTIN_MODEL,
    DistributedConfig,
    DPOConfig,
    GRPOConfig,
    LoraConfig,
    OfflineConfig,
    PPOConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    exit_with_user_error,
    parse_config,
    print_text,
)
from lightrl.config.options import as_dict
from lightrl.config.paths import why_unwritable
from lightrl.config.yaml_text import read_yaml
from lightrl.data.chat_arguments import set_template_file
from lightrl.models.lora import add_adapters
from lightrl.models.multimodal import MediaProcessor
from lightrl.models.policy import load_policy, load_tokenizer
from lightrl.strategy import create_strategy
from lightrl.strategy.saving.state_files import HASH_FILE
from lightrl.trainers.best import step_of_best
from lightrl.trainers.earlier_run import config_file, last_step, read_rows
from lightrl.trainers.hash_run import compared
from lightrl.trainers.hub_push import Repository
from lightrl.trainers.model_card import write_card
from lightrl.trainers.turn_end import end_of_turn, stop_at
from lightrl.wording import counted


def main(arguments: Sequence[str]) -> int:
    """Exports the model of the run whose folder is named."""
    asked = _parser().parse_args(arguments)
    run = Path(asked.run)
    try:
        config = _config_of(run)
        name, done = _chosen(run, config, asked)
        target = Path(asked.output) if asked.output else run / "exports" / name
        if os.path.exists(target):
            raise ValueError(f"{target} exists. Delete it, or name another folder by --output.")
        if problem := why_unwritable(target):
            raise ValueError(f"{target} cannot be written: {problem}. Name another folder by --output.")
        repository = Repository(asked.push, is_private=True) if asked.push else None
        if name in ("final", "best"):
            shutil.copytree(run / name, target)
        else:
            _write(config, run, done, target)
        write_card(target, run, config, step=done)
        print_text(f"model: {target}")
        if repository is not None:
            print_text(f"uploaded: {repository.upload(target, counted(done, 'step'))}")
    except (ValueError, OSError) as error:
        exit_with_user_error(error)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightrl export",
        description="Write the model of a run as a Hugging Face folder with a card: final/, best/, or a checkpoint.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--step", type=int, default=0, help="a checkpoint's step (default: final/, or the newest)")
    parser.add_argument("--best", action="store_true", help="best/, the model that --eval.best has kept")
    parser.add_argument("--output", metavar="DIR", help="folder to write (default: RUN/exports/NAME)")
    parser.add_argument("--hub.push", dest="push", metavar="NAME", help="upload it to this repository of the hub")
    return parser


def _config_of(run: Path) -> RunConfig:
    """Returns the options of a run that trained a language model."""
    saved: Mapping[str, Any] = read_yaml(config_file(run), "it")
    kinds: list[type[RunConfig]] = [PPOConfig] if "critic" in saved else [GRPOConfig, SFTConfig, DPOConfig]
    kind = next((kind for kind in kinds if set(saved) <= set(kind.__dataclass_fields__)), None)
    if kind is None:
        raise ValueError(f"{run} trained no language model: final/ holds its model.")
    return parse_config(kind, ["--config", str(run / "config.yaml"), "--log.to="])  # loggers may be installed elsewhere


def _chosen(run: Path, config: RunConfig, asked: argparse.Namespace) -> tuple[str, int]:
    """Returns the name of the model to export, final, best or step-N, and its step."""
    if asked.best and asked.step:
        raise ValueError("--best and --step name two models: give one.")
    if asked.best:
        return "best", step_of_best(run)
    final = None if asked.step else _step_of_final(run, config)
    step = _checkpoint_of(run, asked.step) if final is None else final
    return f"step-{step}" if final is None else "final", step


def _step_of_final(run: Path, config: RunConfig) -> int | None:
    """Returns the step after which final/ was saved; None if it is incomplete, or from before more --max_steps."""
    if not (run / "final" / HASH_FILE).is_file() or compared(run / "final")[1]:
        return None
    rows = read_rows(run / "metrics.jsonl")
    step: int = rows[-1]["step"] if rows else config.max_steps
    last = last_step(as_dict(config), rows)
    return step if step >= (last or step) else None


def _checkpoint_of(run: Path, step: int) -> int:
    steps = CheckpointDirectory(run / "checkpoints", keep=1).steps()
    if not steps or (step and step not in steps):
        known = f"There are {', '.join(map(str, steps))}." if steps else "There is none: it was run without."
        wanted = f"checkpoint of step {step}" if step else "checkpoint, and no complete final/ of its last step"
        raise ValueError(f"{run} has no {wanted}. {known}")
    return step or steps[-1]


def _template_of(run: Path, given: str) -> str:
    """Returns the file of the chat template: one that the run saved with a model or, without any, the given one."""
    saved = [*run.glob("final/chat_template.jinja"), *run.glob("exports/step-*/chat_template.jinja")]
    return str(max(saved, key=lambda path: path.stat().st_mtime, default=given))


def _write(config: RunConfig, run: Path, step: int, target: Path) -> None:
    """Loads the weights of a checkpoint in this process and writes them."""
    if isinstance(config, PPOConfig) and config.critic.shared_backbone:
        raise ValueError(
            f"{run} has checkpoints that hold the policy with the critic on its backbone (--critic.shared_backbone), "
            "which cannot be exported. Use final/, which the run writes at its end."
        )
    if not torch.cuda.is_available():  # DeepSpeed, which transformers imports if it is there, warns of that on stdout
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    own = SFTConfig(strategy="single", distributed=DistributedConfig(device="cpu"))
    strategy = create_strategy(own)
    strategy.setup_distributed()
    path = str(builtin_model_path()) if config.model == BUILTIN_MODEL else config.model
    policy = load_policy(path, materialize=True, trust_remote_code=config.trust_remote_code)
    tokenizer = load_tokenizer(path, trust_remote_code=config.trust_remote_code)
    media = MediaProcessor.load(path, trust_remote_code=config.trust_remote_code)
    saved = media.processor if media else tokenizer
    if isinstance(config, RolloutConfig | OfflineConfig) and config.data.chat_template_file:
        for renderer in (tokenizer, saved):
            set_template_file(renderer, _template_of(run, config.data.chat_template_file))
    if isinstance(config, SFTConfig | DPOConfig):  # the answers that it was trained on may be elsewhere
        ends = {end_of_turn(tokenizer), tokenizer.eos_token_id}
        stop_at([end for end in ends if end is not None], policy.hf, tokenizer)
    lora: LoraConfig = config.lora
    if lora.is_on:
        add_adapters(policy.hf, lora, seed=config.seed)
    model = strategy.prepare_trained(policy).model
    directory = CheckpointDirectory(run / "checkpoints", keep=1)
    strategy.load_ckpt(model, str(run / "checkpoints"), tag=directory.path(step).name, load_module_only=True)
    saved.save_pretrained(target)
    strategy.save_pretrained(model, target)
