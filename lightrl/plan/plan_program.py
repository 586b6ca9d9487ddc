"""The program `lightrl plan`, and --dry_run of every trainer."""

from __future__ import annotations

import copy
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from lightrl.builtin.model import builtin_model_path
from lightrl.config import (
    BUILTIN_MODEL,
    EvaluateConfig,
    GRPOConfig,
    OfflineConfig,
    PPOConfig,
    RolloutConfig,
    RunConfig,
    check_own_options,
    exit_with_user_error,
    print_text,
)
from lightrl.models.lora import require_peft
from lightrl.models.option_names import naming
from lightrl.models.policy import check_model_folder, load_config
from lightrl.plan.command import PlanConfig
from lightrl.plan.fit import SAFE_SHARE, changed, choose, fits, flags_of, remedies
from lightrl.plan.named import check_named
from lightrl.plan.peaks import Machine, Models, plan_run
from lightrl.plan.spread import num_trainers, strategy_name
from lightrl.plan.text import as_json, size_text, table, verdict
from lightrl.strategy import strategy_class
from lightrl.strategy.layout.meshes import MeshSizes, check_mesh
from lightrl.strategy.layout.tensor_parallel import check_parameters, check_splits

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_RESPONSE = 512  # assumed tokens of an example, as data is not read


def dry_run(config: RunConfig) -> int:
    """Plans a run for the ranks and devices on which it was started; rank 0 prints."""
    if isinstance(config, EvaluateConfig):
        exit_with_user_error(ValueError("--dry_run plans a run that trains, and an evaluation does not: leave it out."))
    try:
        check_named(config)
    except (ValueError, OSError, ImportError) as error:
        exit_with_user_error(error)
    name = type(config).__name__.removesuffix("Config").lower()
    return plan_of(config, PlanConfig(), name, is_here=True)


def plan_of(config: RunConfig, asked: PlanConfig, name: str, *, is_here: bool = False) -> int:
    """Plans a run and prints the plan on rank 0; returns the exit code.

    name: of the trainer. is_here: whether the run would have the ranks and the device of this process.
    """
    try:
        machine = machine_of(config, asked, is_here=is_here)
        check_own_options(config, strategy_class(config.strategy))
        trainers = num_trainers(config, machine.ranks)
        is_fsdp = strategy_name(config, trainers) == "fsdp"
        if is_fsdp:
            sizes = MeshSizes(replicas=config.fsdp.replicate_size, tokens=config.sp_size, tensors=config.tp_size)
            check_mesh(trainers, sizes)
        models = models_of(config)
        if is_fsdp:
            _check_splits(config, models)
        config, chosen = _fitting(config, models, machine) if asked.fit else (config, "")
        made = plan_run(config, models, machine)
    except (ValueError, OSError, ImportError) as error:
        exit_with_user_error(error)
    _warn_of_short_responses(config, asked)
    _warn_of_unread_adapters(config, models)
    is_enough = fits(made, machine)
    found = [] if is_enough else remedies(config, models, machine, made)
    if os.environ.get("RANK", "0") == "0":
        title = f"{name}: {made.num_weights / 1e9:.3g}B weights on {machine.ranks} rank(s) by " + strategy_name(
            config, trainers
        )
        text = f"{chosen}{table(made, machine, title)}\n{verdict(made, machine, is_enough=is_enough, found=found)}"
        as_object = as_json(made, is_enough=is_enough, found=found, chosen=chosen.strip())
        print_text(as_object if asked.json else text)
    return int(not is_enough)


def _check_splits(config: RunConfig, models: Models) -> None:
    """Raises ValueError, as the run would, for a model that --tp_size or --sp_size cannot split."""
    for model in models.all:
        check_splits(model.hf_config, tp_size=config.tp_size, sp_size=config.sp_size)
        if config.tp_size > 1:
            modules = model.make(copy.deepcopy(model.hf_config)).modules()
            check_parameters(next(inner for inner in modules if isinstance(inner, PreTrainedModel)).get_decoder())


def _warn_of_short_responses(config: RunConfig, asked: PlanConfig) -> None:
    """Warns if responses have the default length, which suits only the built-in model."""
    if not isinstance(config, RolloutConfig) or config.model == BUILTIN_MODEL or asked.response_tokens:
        return
    default = RolloutConfig().max_new_tokens
    if config.max_new_tokens == default and os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"The plan is for responses of {default} tokens, the default of --max_new_tokens: give the length of those "
            "of your run.\n\n"
        )


def _warn_of_unread_adapters(config: RunConfig, models: Models) -> None:
    adapters = models.adapters_of(config)
    for reason in adapters.unread if adapters is not None and os.environ.get("RANK", "0") == "0" else ():
        sys.stderr.write(f"The plan leaves an adapter out, which the engine would hold, too: {reason}\n\n")


def _fitting(config: RunConfig, models: Models, machine: Machine) -> tuple[RunConfig, str]:
    """Returns the config with options that make the run fit, unchanged if there are none, and what to say of them."""
    if not machine.memory:
        raise ValueError("--fit True needs the memory of a device: give --device_memory, such as 24GB.")
    chosen = choose(config, models, machine)
    if not fits(chosen.plan, machine, SAFE_SHARE):
        lora = "" if config.lora.is_on else ", --lora.rank 32"
        return config, (
            f"--fit: no choice fits. The least peak is {size_text(chosen.plan.peak.total)} in "
            f"{chosen.plan.peak.name!r}, by {chosen.flags()}. Use more --ranks{lora}, or a smaller model.\n\n"
        )
    kept = "" if "dtype" in chosen.changes else f" (--dtype {config.dtype} as before)"
    told = f"--fit: {flags_of(chosen.changes) or 'it fits as it is'}{kept}\n\n"
    return changed(config, chosen.changes), told


def machine_of(config: RunConfig, asked: PlanConfig, *, is_here: bool = False) -> Machine:
    """Returns the machine that the run must fit on, from the options or as this process sees it.

    A device is a GPU unless --distributed.device says otherwise. is_here: the run is for this machine's devices.
    """
    device = config.distributed.device
    has_gpu = device == "cuda" or not is_here or torch.cuda.is_available()
    response = asked.response_tokens or (_RESPONSE if isinstance(config, OfflineConfig) else 0)
    memory = parse_size(asked.device_memory) if asked.device_memory else _own_memory()
    return Machine(
        ranks=asked.ranks or int(os.environ.get("WORLD_SIZE", "1")),
        memory=memory,
        prompt_tokens=asked.prompt_tokens,
        response_tokens=response,
        is_accelerator=device != "cpu" and has_gpu,
    )


def parse_size(text: str) -> float:
    """Returns the bytes of a text such as 24GB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", text.upper())
    if found is None:
        raise ValueError(f"--device_memory {text!r}: give a number with a unit, such as 24GB or 80GiB.")
    return float(found[1]) * _UNITS[found[2]]


def _own_memory() -> float:
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else 0.0


def models_of(config: RunConfig) -> Models:
    """Returns the models of a run, made only from their configs."""
    if config.lora.is_on:
        require_peft(config.lora)
    others: dict[str, Any] = {}
    if isinstance(config, PPOConfig) and config.critic_model:
        with naming("--critic_model"):
            others["critic"] = _read_config(config.critic_model, config.trust_remote_code)
    if isinstance(config, GRPOConfig) and config.teacher_model:
        with naming("--teacher_model"):
            others["teacher"] = _read_config(config.teacher_model, config.trust_remote_code)
    if isinstance(config, RolloutConfig) and config.reward_model:
        with naming("--reward_model"):
            others["reward_model"] = _read_config(config.reward_model, config.trust_remote_code)
    return Models(_read_config(config.model, config.trust_remote_code), config, others)


def _read_config(path: str, trust_remote_code: bool) -> Any:
    found = _config_at(path, trust_remote_code)
    if not hasattr(found.get_text_config(), "num_attention_heads"):
        raise ValueError(f"A plan counts what attention needs, and type {found.model_type!r} has no attention heads.")
    return found


def _config_at(path: str, trust_remote_code: bool) -> Any:
    path = str(builtin_model_path()) if path == BUILTIN_MODEL else path
    if not path.endswith(".json"):
        try:
            if not os.path.exists(path):
                check_model_folder(path)
            return load_config(path, trust_remote_code=trust_remote_code)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{error} A plan also takes the path of the model's config.json.") from error
    try:
        fields = json.loads(Path(path).read_bytes())
        return AutoConfig.for_model(**fields)
    except Exception as error:  # transformers' checks of a config raise errors of their own
        raise ValueError(f"--model {path} is no config.json of a model ({' '.join(str(error).split())}).") from error
