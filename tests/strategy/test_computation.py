"""Compiled blocks (the same training, no new graphs for new lengths, what is refused), and rounding in bfloat16."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import transformers
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from lightrl.config import GRPOConfig, LoraConfig, StrategyOptions, parse_config
from lightrl.models import lora
from lightrl.models.critic import Critic, ValueHead
from lightrl.strategy import create_strategy
from lightrl.strategy.computation import (
    check_compiler,
    compile_blocks,
    compute_in_bfloat16,
    enable_gradient_checkpointing,
)
from lightrl.strategy.torch_native import SingleStrategy
from lightrl.testing import run_spmd
from lightrl.testing.tiny_training import make_batch, parameters, samples, sgd, tiny_policy, train, trainable
from tests.programs.tiny_moe import CONFIGS, DEEPSEEK, NUM_EXPERTS, SHAPE

STEPS = 4
LATENT = {**SHAPE, **DEEPSEEK, "first_k_dense_replace": 0}
ROUTED = {**SHAPE, "n_routed_experts": NUM_EXPERTS, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
IN_FLOAT32: dict[str, Any] = {
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**LATENT),
    "deepseek_v3": CONFIGS["deepseek_v3"],
    "dots1": lambda: transformers.Dots1Config(**ROUTED, n_shared_experts=1),
    "ernie4_5_moe": lambda: transformers.Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=NUM_EXPERTS, moe_k=2),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**ROUTED),
}


def strategy_with(**options: Any) -> SingleStrategy:
    strategy = SingleStrategy(0, 0.0, 1, 1, StrategyOptions(exact_batches=True, **options))
    strategy.setup_distributed()
    return strategy


def train_steps(strategy: SingleStrategy, policy: nn.Module) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each, with a pass without gradients between."""
    strategy.register(policy, sgd(trainable(policy)))
    found = []
    for step in range(STEPS):
        strategy.forward([make_batch(samples(step))], model=policy)
        result = train(strategy, policy, step)
        found.append((result.loss, result.grad_norm))
    return found


def test_checkpointing_has_the_name_of_the_installed_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.24 warns about the old name, for the body of a critic too."""
    called = []
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "activation_checkpointing_enable",
        lambda model, activation_checkpointing_kwargs: called.append((model, activation_checkpointing_kwargs)),
        raising=False,
    )
    body = transformers.LlamaModel(transformers.LlamaConfig(**SHAPE))
    critic = Critic(body, ValueHead(SHAPE["hidden_size"]))
    enable_gradient_checkpointing(critic)
    enable_gradient_checkpointing(body)
    assert called == [(body, {"use_reentrant": False})] * 2
    with pytest.raises(ValueError, match="--gradient_checkpointing needs a transformers model, not Linear"):
        enable_gradient_checkpointing(nn.Linear(1, 1))


def num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)  # beyond it torch would go on without compiling
def test_compiled_blocks_train_alike_and_are_made_once() -> None:
    """By dynamo alone: what it traces, and when anew, is the same for every compiler behind it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    pair = []
    for is_compiled in (False, True):
        strategy, policy = strategy_with(), tiny_policy()
        lora.add_adapters(policy.hf, LoraConfig(rank=2), seed=0)
        enable_gradient_checkpointing(policy.hf)
        names = [name for name, _ in policy.named_parameters()]
        if is_compiled:
            compile_blocks(policy, backend="eager")
            compile_blocks(policy, backend="eager")  # changes nothing
        pair.append((train_steps(strategy, policy), parameters(strategy, policy)))
        assert [name for name, _ in policy.named_parameters()] == names
    (plain, plain_weights), (compiled, compiled_weights) = pair
    assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-5, rtol=0)
    for name, value in plain_weights.items():
        assert_close(compiled_weights[name], value, atol=1e-5, rtol=0)
    before = num_graphs()
    # Before and after attention, of the block and of its attention: 4; with gradients and without; and anew where the
    # first block's input needs none.
    assert 0 < before <= 12
    train_steps(strategy, policy)
    strategy.forward([make_batch(samples(9, count=3))], model=policy)
    assert num_graphs() == before  # whatever the lengths


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_option_compiles_for_this_machine() -> None:
    torch._dynamo.reset()
    plain = train_steps(strategy_with(), tiny_policy())
    strategy, policy = strategy_with(compile=True), tiny_policy()
    compiled = train_steps(strategy, policy)
    assert num_graphs() > 0
    assert_close(torch.tensor(compiled), torch.tensor(plain), atol=1e-5, rtol=0)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match="finds no 'no-such-compiler'"):
        check_compiler(torch.device("cpu"))
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match="--compile does not go with --strategy deepspeed"):
        create_strategy(parse_config(GRPOConfig, ["--strategy", "deepspeed", "--compile", "True"]))


@pytest.mark.parametrize("family", IN_FLOAT32)
def test_routers_that_ask_for_float32_compute_in_it_under_bfloat16(family: str) -> None:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(IN_FLOAT32[family]())
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    found: list[tuple[Any, Any]] = []
    for router in routers:
        torch.nn.init.normal_(router.weight)
        router.register_forward_hook(lambda module, args, output: found.append((module, (args[0], output[0]))))
    compute_in_bfloat16(model, torch.device("cpu"))
    logits = model(torch.arange(16)[None]).logits
    assert logits.dtype == torch.bfloat16  # the rest of the model
    assert len(found) == len(routers) > 0
    for router, (hidden, output) in found:
        wanted = F.linear(hidden.float(), router.weight).view(-1, NUM_EXPERTS)
        # Logits of about 6, which bfloat16 rounds by up to 1e-2.
        assert_close(output.view(-1, NUM_EXPERTS), wanted, atol=1e-5, rtol=0)
    logits.float().logsumexp(-1).sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers)


class _Mixed(nn.Module):
    """Casts for one product only, so that autocast must stay on for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.inner = nn.Linear(3, 3)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight.float()) + self.inner(hidden.bfloat16())


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "olmoe"])
def test_routers_that_ask_for_nothing_compute_in_bfloat16(family: str) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(CONFIGS[family]())
    compute_in_bfloat16(model, torch.device("cpu"))
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == [""]


class _Outdented(nn.Linear):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        _ = """A text
that begins further left."""
        return super().forward(hidden)


def test_a_forward_that_cannot_be_parsed_by_itself_stays_under_autocast() -> None:
    module = nn.Sequential(_Outdented(3, 3))
    compute_in_bfloat16(module, torch.device("cpu"))
    assert module(torch.ones(2, 3)).dtype == torch.bfloat16


def test_a_module_that_calls_layers_with_weights_stays_under_autocast() -> None:
    module = nn.Sequential(_Mixed())
    compute_in_bfloat16(module, torch.device("cpu"))
    assert module(torch.ones(2, 3)).dtype == torch.bfloat16


# ---- Several ranks in bfloat16 ---------------------------------------------------------------------------------------

ROUNDING = Path(__file__).resolve().parents[1] / "programs" / "rounding_program.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_bfloat16_on_two_ranks_differs_by_the_packs_alone(tmp_path: Path, name: str) -> None:
    """With the packs of one process, two ranks differ from it by the sums of gradients alone, which are in float32."""
    for world in (1, 2):
        run_spmd(ROUNDING, str(tmp_path), "--strategy", name, world_size=world)
    one, two = (torch.load(tmp_path / f"{world}.pt", weights_only=True) for world in (1, 2))
    for size, update in one.items():
        assert (two[size] - update).norm() < 1e-6 * update.norm()
    assert (one[3] - one[6]).norm() > 3e-4 * one[3].norm()  # it was bfloat16: other packs are rounded otherwise
