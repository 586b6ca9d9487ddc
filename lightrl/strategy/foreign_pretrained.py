"""Finds what code for other trainers only names in its arguments: the tokenizer and the engine's first model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lightrl.config.foreign_options import MODEL_NAMES
from lightrl.models.policy import load_config, load_policy, load_tokenizer, model_loader
from lightrl.strategy.foreign_models import Native
from lightrl.strategy.optim.parameter_kinds import apply_lr_scales


def first_model(strategy: Native, args: Any) -> nn.Module:
    """Returns the model for an engine that was given no actor: the trained one, or the one that args name."""
    entries = [entry for entry in strategy.trained.entries if getattr(entry.model, "is_actor", False)]
    if not entries and len(strategy.trained.entries) == 1:
        entries = strategy.trained.entries
    if entries:
        model: nn.Module = entries[0].model
        return model
    for name in _names(args, strategy.args):
        trusted = strategy.options.trust_remote_code
        config = load_config(name, trust_remote_code=trusted)
        loaded: nn.Module = model_loader(config).from_pretrained(name, dtype=torch.float32, trust_remote_code=trusted)
        return loaded.to(strategy.device).eval().requires_grad_(False)
    raise ValueError(
        "The engine needs a model: prepare the actor first, or pass it as setup_inference_engine(args, ..., "
        f"actor=actor), or name a folder in one of {', '.join(MODEL_NAMES)} of args."
    )


def named_policy(strategy: Any) -> nn.Module:
    """Returns the policy that the strategy's arguments name, on the meta device where its weights come later."""
    for name in _names(strategy.args):
        trusted = strategy.options.trust_remote_code
        return load_policy(name, materialize=strategy.materializes_weights, trust_remote_code=trusted)
    raise ValueError(
        f"There is no model to build: name a folder in one of {', '.join(MODEL_NAMES)} of args, or override "
        "model_provider_func()."
    )


def set_up_trained(strategy: Any) -> None:
    """Trains the model of model_provider_func(); stores it, its optimizer and its schedule on the strategy."""
    model = strategy.model_provider_func()
    apply_lr_scales([model], strategy.options.optim, must_match=True)
    strategy.model = strategy.prepare_model(model)
    strategy.optimizer = strategy.build_optimizer(strategy.model)
    strategy.lr_scheduler = strategy.build_lr_scheduler(strategy.optimizer)
    strategy.register(strategy.model, strategy.optimizer, strategy.lr_scheduler)
    strategy.build_grad_scaler(False)  # gradients are float32 and need no scale


def find_tokenizer(strategy: Native) -> Any:
    """Returns the tokenizer of the model that trains or that the arguments name."""
    models = [strategy.unwrap_model(entry.model) for entry in strategy.trained.entries]
    paths = [str(getattr(model, "name_or_path", "") or "") for model in models]
    for name in (*_names(strategy.args), *filter(None, paths)):
        try:
            return load_tokenizer(name, trust_remote_code=strategy.options.trust_remote_code)
        except (OSError, ValueError):
            continue
    raise ValueError("Text prompts and stop strings need a tokenizer: set strategy.tokenizer, or give token ids.")


def _names(*several: Any) -> Iterator[str]:
    for args in several:
        for name in MODEL_NAMES:
            value = args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)
            if isinstance(value, str) and value:
                yield value
