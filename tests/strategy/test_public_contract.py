"""Code written for the public description of the contract runs unchanged: names, order, defaults, and two loops."""

from __future__ import annotations

import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lightrl.config import OptimConfig
from lightrl.strategy import EngineStatus, StrategyBase, is_actor, strategy_class
from lightrl.strategy.torch_native import SingleStrategy

STRATEGIES = [StrategyBase, SingleStrategy, *map(strategy_class, ("ddp", "fsdp", "deepspeed", "megatron"))]
ABSTRACT = {"create_optimizer", "backward", "optimizer_step", "save_ckpt", "load_ckpt"}
SIGNATURES = {
    "__init__": "self, seed, max_norm, micro_train_batch_size, train_batch_size, args=None",
    "set_seed": "self, seed",
    "setup_distributed": "self, timeout=None, num_gpu_per_node=8",
    "create_optimizer": "self, model, **kwargs",
    "prepare": "self, *models_or_model_optim_pairs, is_rlhf=False",
    "prepare_models_and_optimizers": "self, actor, critic, reward_models, initial_model, args, max_steps",
    "backward": "self, loss, model, optimizer, **kwargs",
    "optimizer_step": "self, optimizer, model, scheduler, name='model', **kwargs",
    "setup_dataloader": "self, replay_buffer, batch_size, pin_memory=False, shuffle=True, collate_fn=None, "
    "drop_last=True, sampler=None, consumed_samples=0",
    "save_ckpt": "self, model, save_dir, tag=None, max_num=3, max_mem=1000, client_state=None, save_latest=True",
    "load_ckpt": "self, model, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, "
    "load_lr_scheduler_states=True, load_module_only=False",
    "all_reduce": "self, data, op='mean'",
    "all_gather": "self, data",
    "get_rank": "self",
    "unwrap_model": "self, model",
    "init_model_context": "self",
    "setup_inference_engine": "self, args, engine_type='vllm', actor=None",
    "engine_generate_local": "self, sampling_params, prompt_token_ids=None, multi_modal_inputs=None",
    "gather_and_generate": "self, sampling_params, all_prompt_token_ids=None, all_prompts=None, all_images=None, "
    "sleep_engine=True, images_num=None, all_videos=None, videos_num=None",
    "update_engine_weights": "self, actor",
    "maybe_sleep_inference_engine": "self",
    "wakeup_inference_engine": "self",
    "maybe_offload_optimizer": "self, optimizer",
    "maybe_load_optimizer": "self, optimizer, device=None",
    "print": "*msg",
    "is_rank_0": "",
    "report_memory": "prefix=''",
    "sync_and_clear_cache": "",
    "_build_multimodal_inputs": "all_prompts, all_images, images_num, all_videos, videos_num",
    # The model manager's side of it.
    "get_model_state_dict": "self, cpu_offload=False, full_state_dict=True",
    "offload_param_and_grad": "self, offload_grad=False",
    "load_param_and_grad": "self, device_id=None, load_grad=False",
    "offload_optimizer": "self",
    "load_optimizer": "self, device_id=None",
    "before_micro_batch": "self, model, is_last_micro_batch",
    "build_lr_scheduler": "self, optimizer, optim_config=None",
    "build_optimizer": "self, model, enable_critic_warmup=False",
    "build_grad_scaler": "self, enabled, **kwargs",
    "model_provider_func": "self",
    "setup_model_and_optimizer": "self",
    "save_checkpoint": "self, save_path, step=0",
    "load_checkpoint": "self, load_path",
    "sync_model_to_rollout": "self",
    "set_global_step": "self, global_step",
    # The training engine's side.
    "train_batch": "self, data, loss_fn, loss_weight_fn",
    "eval_batch": "self, data, loss_fn, loss_weight_fn",
    "forward": "self, data",
    "step_lr_scheduler": "self",
}
CLASS_METHODS = ("print", "is_rank_0", "report_memory", "sync_and_clear_cache", "_build_multimodal_inputs")


def written(parameter: inspect.Parameter) -> str:
    star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    return f"{star}{parameter.name}" + ("" if parameter.default is parameter.empty else f"={parameter.default!r}")


@pytest.mark.parametrize("cls", STRATEGIES)
@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_and_further_arguments_are_optional(cls: type[StrategyBase], name: str) -> None:
    parameters = list(inspect.signature(getattr(cls, name)).parameters.values())
    wanted = [part for part in SIGNATURES[name].split(", ") if part]
    assert [written(parameter) for parameter in parameters[: len(wanted)]] == wanted
    assert all(parameter.default is not parameter.empty for parameter in parameters[len(wanted) :])


def test_what_is_abstract_what_is_of_the_class_and_the_two_states() -> None:
    assert StrategyBase.__abstractmethods__ >= ABSTRACT
    assert all(inspect.ismethod(inspect.getattr_static(StrategyBase, name).__get__(None, StrategyBase))
               for name in CLASS_METHODS)  # fmt: skip
    assert {status.name: status.value for status in EngineStatus} == {"SLEEPED": 0, "WAKEUP": 1}


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        nn.init.ones_(self.layer.weight)

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.layer(rows)
        return found


def test_a_loop_in_the_first_words(tmp_path: Path) -> None:
    """Models, optimizers, loader, backward, step, checkpoint: two updates of two micro-batches, by plain torch too."""
    args = Namespace(actor_learning_rate=0.1, adam_betas=(0.9, 0.99), l2=0.0, lr_scheduler="constant")
    strategy = SingleStrategy(seed=1, max_norm=0.5, micro_train_batch_size=2, train_batch_size=4, args=args)
    strategy.setup_distributed()
    with strategy.init_model_context():
        actor, critic = Rows(), Rows()
    (actor, optimizer, scheduler), (critic, *_), reward, initial = strategy.prepare_models_and_optimizers(  # type: ignore[assignment]
        actor, critic, [Rows()], Rows(), args, 10
    )
    assert (is_actor(actor), is_actor(critic), len(reward)) == (True, False, 1)
    assert not any(parameter.requires_grad for model in (*reward, initial) for parameter in model.parameters())
    data = [torch.tensor([float(place), 1.0]) for place in range(9)]
    loader = strategy.setup_dataloader(data, 2, shuffle=False)
    plain = Rows()
    adam = torch.optim.AdamW(plain.parameters(), lr=0.1, betas=(0.9, 0.99), weight_decay=0.0)
    seen: list[float] = []
    for place, rows in enumerate(loader):
        strategy.backward(actor(rows).pow(2).mean(), actor, optimizer)
        strategy.optimizer_step(optimizer, actor, scheduler, name="actor")
        seen += rows[:, 0].tolist()
        (plain(rows).pow(2).mean() / 2).backward()
        if place % 2:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            adam.step()
            adam.zero_grad()
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7]  # the ninth does not fill a batch
    assert_close(actor.layer.weight, plain.layer.weight, atol=1e-6, rtol=0)
    assert strategy.all_reduce({"loss": 2.0, "count": 3}, "sum") == {"loss": 2.0, "count": 3}
    with pytest.raises(AssertionError, match="Unknown reduction 'median'"):
        strategy.all_reduce(1.0, "median")
    assert strategy.all_gather(torch.tensor([1, 2])).tolist() == [1, 2]
    report = strategy.report_memory("after two updates")
    assert report["memory/host_gb"] > 0
    strategy.save_ckpt(actor, str(tmp_path), tag="last", client_state={"consumed_samples": 8})
    nn.init.zeros_(actor.layer.weight)
    path, state = strategy.load_ckpt(actor, str(tmp_path), tag="last")
    assert (Path(path).parent.name, state) == ("last", {"consumed_samples": 8})
    assert_close(actor.layer.weight, plain.layer.weight, atol=1e-6, rtol=0)
    rest = strategy.setup_dataloader(data, 1, shuffle=False, drop_last=False, consumed_samples=8)
    assert [rows[0, 0].item() for rows in rest] == [8.0]


def test_prepare_gives_back_what_it_got() -> None:
    strategy = SingleStrategy(1, 1.0, 1, 1)
    model, other = Rows(), Rows()
    optimizer = strategy.create_optimizer(model)
    assert strategy.prepare(None) is None
    assert strategy.prepare(other) is other
    pair = strategy.prepare((model, optimizer))
    assert pair[0] is model
    assert pair[1] is optimizer
    both = strategy.prepare((model, optimizer, None), Rows(), is_rlhf=True)
    assert isinstance(both, list)
    assert both[0][2] is None
    assert not both[1].training
    assert other.training  # without is_rlhf it may be trained


def test_a_loop_in_the_words_of_a_model_manager(tmp_path: Path) -> None:
    """Accumulation, offload of everything between the micro-batches, a schedule, a state dict, a checkpoint."""
    strategy = SingleStrategy(1, 0.0, 1, 2, Namespace(lr=0.5, optim={"betas": (0.0, 0.0)}))
    strategy.setup_distributed()
    model: Any = strategy.prepare_model(Rows())
    optimizer = strategy.build_optimizer(model)
    scheduler = strategy.build_lr_scheduler(optimizer, OptimConfig(schedule="linear"), 2)
    strategy.register(model, optimizer, scheduler)
    scaler = strategy.build_grad_scaler(False)
    for place, row in enumerate((torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))):
        with strategy.before_micro_batch(model, is_last_micro_batch=place == 1):
            strategy.backward(scaler.scale(model(row).sum()), model, optimizer)
        strategy.offload_param_and_grad(offload_grad=True)
        strategy.offload_optimizer()
        with pytest.raises(RuntimeError, match="weights are offloaded"):
            model(row)
        strategy.load_param_and_grad(0, load_grad=True)
        strategy.load_optimizer(0)
        step = strategy.optimizer_step(optimizer, model, scheduler)
    grad_norm, lr_list = step[:2]
    assert grad_norm == pytest.approx((2.0**2 + 3.0**2) ** 0.5, abs=1e-6)  # of the means of (1, 3) and (2, 4)
    assert lr_list == [0.5]
    assert optimizer.param_groups[0]["lr"] == 0.25  # half of the way of two updates
    # Adam without memory steps by lr x sign of the gradient
    state = strategy.get_model_state_dict(cpu_offload=True, full_state_dict=True)
    assert_close(state["layer.weight"], torch.tensor([[0.5, 0.5]]), atol=1e-6, rtol=0)
    strategy.save_checkpoint(str(tmp_path), step=7)
    strategy.set_global_step(0)
    strategy.load_checkpoint(str(tmp_path))
    assert strategy.global_step == 7
