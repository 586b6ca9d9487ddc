"""The models of a run as fake tensors: real modules and shapes, with no memory behind them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModel, AutoModelForSequenceClassification

from lightrl.config import RunConfig
from lightrl.models.critic import ActorCritic, Critic, ValueHead
from lightrl.models.lora import add_adapters
from lightrl.models.policy import Policy, model_loader
from lightrl.models.reward_model import HEAD_NAME, RewardModel
from lightrl.strategy.fsdp import transformer_blocks

Build = Callable[[Any], nn.Module]  # makes a module from a transformers config


FLOAT = 4  # bytes of a number in float32, as parameters, gradients and optimizer states are
SCORER = "reward model"  # role of the model of the reward reward_model, which scores whole sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """The facts about a parameter."""

    name: str
    shape: tuple[int, ...]
    is_trained: bool
    unit: int  # FSDP's unit: the number of the block, from 1, or 0 outside of all blocks
    is_cut: bool = False  # whether tensor parallelism divides it

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Model:
    """One model of a run."""

    role: str  # "policy", "reference", "critic", "teacher" or SCORER
    hf_config: Any
    weights: tuple[Weight, ...]
    buffer_bytes: int
    make: Build

    @property
    def num_layers(self) -> int:
        """Number of transformer blocks."""
        return int(self.hf_config.get_text_config().num_hidden_layers)

    @property
    def trained(self) -> list[Weight]:
        """The weights that an optimizer steps."""
        return [weight for weight in self.weights if weight.is_trained]

    def smaller(self, num_layers: int, tp_size: int = 1) -> nn.Module:
        """Makes the module on the meta device with fewer layers and a tensor-parallel rank's share of the widths.

        It runs no vision tower, since what that needs depends on the images.
        """
        module = self.make(_cut_down(self.hf_config, num_layers, tp_size))
        for child in module.modules():
            if isinstance(child, Policy | Critic):
                child.takes_images = False
        return module


@contextmanager
def fake() -> Iterator[None]:
    """Makes tensors inside the context fake: they have no memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def policy_of(hf_config: Any, config: RunConfig, role: str = "policy") -> Model:
    """Returns a language model of a run; a reference or teacher is frozen and has no adapters."""
    make = _make_policy if role == "policy" else _make_frozen
    return _described(role, partial(make, config), hf_config)


def critic_of(hf_config: Any, config: RunConfig) -> Model:
    """Returns the critic of PPO."""
    return _described("critic", partial(_make_critic, config), hf_config)


def reward_model_of(hf_config: Any, config: RunConfig) -> Model:
    """Returns the classifier that `lightrl train rm` trains."""
    return _described("policy", partial(_make_reward_model, config), hf_config)


def scorer_of(hf_config: Any, config: RunConfig) -> Model:
    """Returns the model of the reward reward_model."""
    return _described(SCORER, partial(_make_scorer, config), hf_config)


def plain_of(hf_config: Any) -> Any:
    """Returns the language model on the meta device, as transformers makes it."""
    return _from_config(model_loader(hf_config).from_config, copy.deepcopy(hf_config))


def _make_policy(config: RunConfig, hf_config: Any) -> nn.Module:
    hf = _from_config(model_loader(hf_config).from_config, hf_config)
    if config.lora.is_on:
        add_adapters(hf, config.lora, seed=0)
    if getattr(getattr(config, "critic", None), "shared_backbone", False):
        return ActorCritic(hf, ValueHead(_hidden_size(hf_config)))
    return Policy(hf)


def _make_frozen(config: RunConfig, hf_config: Any) -> nn.Module:
    hf = _from_config(model_loader(hf_config).from_config, hf_config)
    return Policy(hf, entropy=False).eval().requires_grad_(False)


def _make_critic(config: RunConfig, hf_config: Any) -> nn.Module:
    critic = Critic(_from_config(AutoModel.from_config, hf_config), ValueHead(_hidden_size(hf_config)))
    add_adapters(critic.body, config.lora, seed=0)
    return critic


def _make_reward_model(config: RunConfig, hf_config: Any) -> nn.Module:
    model = _make_scorer(config, hf_config).train().requires_grad_(True)
    add_adapters(model.hf, config.lora, seed=0, trained=(HEAD_NAME,))
    return model


def _make_scorer(config: RunConfig, hf_config: Any) -> RewardModel:
    hf_config = copy.deepcopy(hf_config)
    hf_config.num_labels, hf_config.get_text_config().pad_token_id = 1, 0
    model = RewardModel(_from_config(AutoModelForSequenceClassification.from_config, hf_config))
    return model.eval().requires_grad_(False)


def _from_config(make: Callable[..., Any], hf_config: Any) -> Any:
    with torch.device("meta"):
        return make(hf_config, dtype=torch.float32)


def faked(module: nn.Module) -> nn.Module:
    """Moves a module from the meta device to fake tensors, for which operations choose a real device's kernels."""
    made: dict[int, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                own = nn.Parameter(torch.empty(parameter.shape), requires_grad=parameter.requires_grad)
                child._parameters[name] = made.setdefault(id(parameter), own)
        for name, buffer in child._buffers.items():
            child._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)
    return module


def _hidden_size(hf_config: Any) -> int:
    text = hf_config.get_text_config()
    return int(getattr(text, "word_embed_proj_dim", None) or text.hidden_size)


def _cut_down(hf_config: Any, num_layers: int, tp_size: int) -> Any:
    changed = copy.deepcopy(hf_config)
    text = changed.get_text_config()
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]
    if tp_size > 1:
        text.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            setattr(text, name, max(1, getattr(text, name) // tp_size))
    return changed


def _described(role: str, make: Build, hf_config: Any) -> Model:
    model = make(copy.deepcopy(hf_config))
    blocks = enumerate(transformer_blocks(model), start=1)
    units = {id(parameter): number for number, block in blocks for parameter in block.parameters()}
    weights = tuple(
        Weight(
            name=name,
            shape=tuple(parameter.shape),
            is_trained=parameter.requires_grad,
            unit=units.get(id(parameter), 0),
            is_cut=id(parameter) in units and _is_projection(name, hf_config),
        )
        for name, parameter in sorted(model.named_parameters())
    )
    buffer_bytes = sum(buffer.nbytes for buffer in model.buffers())
    return Model(role=role, hf_config=hf_config, weights=weights, buffer_bytes=buffer_bytes, make=make)


def _is_projection(name: str, hf_config: Any) -> bool:
    """Returns whether tensor parallelism cuts a weight, according to the model's own plan."""
    plan = getattr(hf_config.get_text_config(), "base_model_tp_plan", None) or {}
    cut = {module.rpartition(".")[2] for module, way in plan.items() if way in ("colwise", "rowwise")}
    return name.rpartition(".")[0].rpartition(".")[2] in cut
