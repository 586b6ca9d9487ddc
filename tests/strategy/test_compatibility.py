"""Each row of the tables of members in docs/compatibility.md has a call that does what the row says.

Where a row is about several ranks, the checks of page_ranks_program.py and of StrategyContract go further.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import lightrl
from lightrl.algorithms.corrections import interpolated_logprobs
from lightrl.builtin.model import tiny_model
from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig
from lightrl.engines.base import SamplingParams
from lightrl.models.policy import Policy, response_batch
from lightrl.rollout.late_drop import DroppingScheduler
from lightrl.rollout.rollouts import Rollouts
from lightrl.rollout.scheduler import Rules, forced_first
from lightrl.strategy import StrategyBase
from lightrl.strategy.serving.foreign_params import as_params
from lightrl.strategy.torch_native import SingleStrategy

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
PROMPT = [3, 4]
Check = Callable[[Any, Path], None]
CHECKS: dict[str, Check] = {}


def row(cell: str) -> Callable[[Check], Check]:
    """Makes a function the check of the row whose first cell begins so."""

    def add(check: Check) -> Check:
        assert cell not in CHECKS, cell
        CHECKS[cell] = check
        return check

    return add


def cells() -> list[str]:
    text = PAGE.read_text()
    tables = text[text.index("## Members of other interfaces") : text.index("## Model families")]
    first = re.findall(r"^\| (.+?) \| (?:same|better|differs) \|", tables, flags=re.MULTILINE)
    assert len(first) > 40
    return first


def fresh(*, micro: int = 1, batch: int = 1, **options: Any) -> Any:
    strategy = SingleStrategy(1, None, micro, batch, Namespace(lr=0.5, **options))  # type: ignore[arg-type]
    strategy.setup_distributed()
    return strategy


def trained(strategy: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    return strategy.prepare((model, strategy.create_optimizer(model, lr=0.5)))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    """A strategy with an engine and the policy that it serves."""
    strategy, (model, tokenizer) = fresh(), tiny_model()
    strategy.tokenizer = tokenizer
    policy = Policy(model)
    strategy.prepare((policy, strategy.create_optimizer(policy)))
    strategy.setup_inference_engine(strategy.options, "native", actor=policy)
    yield strategy
    strategy.close()


def test_every_row_has_a_check() -> None:
    assert sorted(CHECKS) == sorted(cells())


@pytest.mark.parametrize("cell", cells())
def test_a_row_is_true(cell: str, served: Any, tmp_path: Path) -> None:
    CHECKS[cell](served, tmp_path)


# ---- LightRFT --------------------------------------------------------------------------------------------------------


@row("`EngineStatus`")
def _(served: Any, _: Path) -> None:
    served.sleep_engine()
    assert served.engine.status is lightrl.EngineStatus.SLEEPED
    assert (lightrl.EngineStatus.SLEEPED.value, lightrl.EngineStatus.WAKEUP.value) == (0, 1)


@row("`StrategyBase(seed, max_norm, micro_train_batch_size, train_batch_size, args=None)`")
def _(_: Any, __: Path) -> None:
    for args in (None, {"lr": 0.5}, Namespace(lr=0.5)):
        strategy = SingleStrategy(1, 0.0, 2, 4, args)
        strategy.setup_distributed()
        assert strategy.options.lr == (0.5 if args else type(strategy.options)().lr)
    with pytest.raises(ValueError, match="4"):
        SingleStrategy(1, 0.0, 3, 4)
    for max_norm in (-1.0, float("nan")):  # a clip by -1 would turn the gradients around
        with pytest.raises(ValueError, match="max_norm"):
            SingleStrategy(1, max_norm, 2, 4)


@row("five abstract methods")
def _(_: Any, __: Path) -> None:
    names = {"create_optimizer", "backward", "optimizer_step", "save_ckpt", "load_ckpt"}
    assert StrategyBase.__abstractmethods__ == names


@row("`set_seed(seed)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    strategy.set_seed(7)
    first = (np.random.rand(), torch.rand(()).item())
    strategy.set_seed(7)
    assert (np.random.rand(), torch.rand(()).item()) == first
    assert strategy.random_stream("a").initial_seed() != strategy.random_stream("b").initial_seed()


@row("`setup_distributed(timeout=None, num_gpu_per_node=8)`")
def _(_: Any, __: Path) -> None:
    strategy = SingleStrategy(1, 0.0, 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        with pytest.raises(RuntimeError, match="setup_distributed"):
            strategy.all_reduce(1.0)
    strategy.setup_distributed(timeout=None, num_gpu_per_node=8)
    assert strategy.comm.world == 1


@row("`create_optimizer(model, **kwargs)`")
def _(_: Any, __: Path) -> None:
    optimizer = fresh().create_optimizer(nn.Linear(1, 1), lr=0.25)
    assert (type(optimizer).__name__, optimizer.param_groups[0]["lr"]) == ("AdamW", 0.25)


@row("`prepare(*items, is_rlhf=False)`")
def _(_: Any, __: Path) -> None:
    strategy, model = fresh(), nn.Linear(1, 1)
    optimizer = strategy.create_optimizer(model)
    nothing, pair, frozen = strategy.prepare(None, (model, optimizer, None), nn.Linear(1, 1), is_rlhf=True)
    assert nothing is None
    assert pair[:2] == (model, optimizer)
    assert not frozen.weight.requires_grad


@row("`prepare_models_and_optimizers(actor, critic, reward_models, initial_model, args, max_steps)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    model = nn.Linear(1, 1, bias=False)
    made = strategy.prepare_models_and_optimizers(model, None, [nn.Linear(1, 1)], None, strategy.options, 4)
    (actor, optimizer, scheduler), critic, rewards, initial = made
    assert optimizer.param_groups[0]["params"] == list(actor.parameters())
    assert scheduler is not None
    assert (critic, initial, len(rewards)) == ((None, None, None), None, 1)


@row("`backward(loss, model, optimizer, **kwargs)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    model, optimizer = trained(strategy)
    strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer, weight=3.0)
    assert model.weight.grad.tolist() == [[3.0, 3.0]]


@row('`optimizer_step(optimizer, model, scheduler, name="model", **kwargs)`')
def _(_: Any, __: Path) -> None:
    strategy = fresh(micro=1, batch=2)
    model, optimizer = trained(strategy)
    before = model.weight.clone()
    strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
    strategy.optimizer_step(optimizer, model, None, name="actor")
    assert torch.equal(model.weight, before)  # the first of two micro-batches
    strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
    step = strategy.optimizer_step(optimizer, model, None)
    assert step[0] == pytest.approx(2**0.5)
    assert not torch.equal(model.weight, before)


@row("`setup_dataloader(replay_buffer, batch_size, ...)`")
def _(_: Any, __: Path) -> None:
    data = [torch.tensor(place) for place in range(5)]
    loader = fresh().setup_dataloader(data, 2, shuffle=False, drop_last=False)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    loader.sampler.set_epoch(0, consumed_samples=4)
    assert [batch.tolist() for batch in loader] == [[4]]


def saved(tmp_path: Path) -> tuple[Any, nn.Module]:
    strategy = fresh()
    model, _ = trained(strategy)
    strategy.save_ckpt(model, str(tmp_path), tag="t", client_state={"n": 3, "rows": [torch.ones(1)]})
    return strategy, model


@row("`save_ckpt(...)`")
def _(_: Any, tmp_path: Path) -> None:
    saved(tmp_path)
    assert list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("*.tmp"))


@row("`load_ckpt(...)`")
def _(_: Any, tmp_path: Path) -> None:
    strategy, model = saved(tmp_path / "saved")
    weight = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    path, state = strategy.load_ckpt(model, str(tmp_path / "saved"), tag="t")
    assert torch.equal(model.weight, weight)
    assert (Path(path).exists(), state["n"]) == (True, 3)
    assert strategy.load_ckpt(model, str(tmp_path / "empty")) == (None, None)


@row('`all_reduce(data, op="mean")`')
def _(_: Any, __: Path) -> None:
    strategy, data = fresh(), {"a": np.float32(1.5), "b": [1, 2]}
    for op in ("mean", "sum", "max", "min"):
        assert strategy.all_reduce(data, op) == data
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="median"):
            strategy.all_reduce(1.0, "median")


@row("`all_gather(data)`")
def _(_: Any, __: Path) -> None:
    assert fresh().all_gather(torch.tensor([1, 2])).tolist() == [1, 2]
    assert fresh().all_gather(3.0).tolist() == [3.0]


@row("`print(*msg)`, `is_rank_0()`, `get_rank()`")
def _(_: Any, __: Path) -> None:
    assert StrategyBase.is_rank_0()
    StrategyBase.print("before", "setup")
    assert fresh().get_rank() == 0


@row("`unwrap_model(model)`")
def _(served: Any, _: Path) -> None:
    (entry,) = served.trained.entries
    assert served.unwrap_model(entry.model) is entry.model.hf


@row("`init_model_context()`")
def _(_: Any, __: Path) -> None:
    with fresh().init_model_context():
        assert nn.Linear(1, 1).weight.device.type == "cpu"


@row('`setup_inference_engine(args, engine_type="vllm", actor=None)`')
def _(_: Any, __: Path) -> None:
    with pytest.raises(ValueError, match="prepare the actor first"):  # the fixture shows that it can be built
        fresh().setup_inference_engine(None, "native")
    with pytest.raises(ValueError, match="nothing"):
        fresh().setup_inference_engine(None, "nothing")


@row("`engine_generate_local(sampling_params, prompt_token_ids=None, multi_modal_inputs=None)`")
def _(served: Any, _: Path) -> None:
    served.wakeup_inference_engine()
    (item,) = served.engine_generate_local({"max_tokens": 3}, prompt_token_ids=[PROMPT])
    names = {"prompt_token_ids", "output_token_ids", "logprobs", "versions", "finish_reason", "sample_index", "text"}
    assert names <= item.keys()
    with pytest.raises(ValueError, match="neither was given"):
        served.engine_generate_local({"max_tokens": 3})


@row("`gather_and_generate(sampling_params, ...)`")
def _(served: Any, _: Path) -> None:
    items = served.gather_and_generate({"max_tokens": 3, "n": 2, "seed": 1}, all_prompt_token_ids=[PROMPT, [5]])
    assert [item.prompt_token_ids for item in items] == [PROMPT, PROMPT, [5], [5]]
    assert served.gather_and_generate({"max_tokens": 3}, all_prompt_token_ids=[]) == []
    assert served.engine.status is lightrl.EngineStatus.SLEEPED
    with pytest.raises(ValueError, match=r"top_p=0.5: a trainer computes"):
        served.gather_and_generate({"top_p": 0.5}, all_prompt_token_ids=[PROMPT], for_training=True)


@row("`sampling_params`")
def _(served: Any, _: Path) -> None:
    theirs = as_params({"max_tokens": 3, "top_k": -1, "min_tokens": 2, "stop": "x"})
    assert theirs == SamplingParams(max_new_tokens=3, min_new_tokens=2, stop=("x",))
    with pytest.raises(ValueError, match="beam_width=4"):
        as_params({"beam_width": 4})
    calls = [served.gather_and_generate({"max_tokens": 8}, all_prompt_token_ids=[PROMPT])[0] for _ in range(4)]
    assert len({tuple(call.output_token_ids) for call in calls}) > 1


@row("stop strings")
def _(served: Any, _: Path) -> None:
    greedy = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    (whole,) = served.gather_and_generate(greedy, all_prompt_token_ids=[PROMPT])
    stop = served.tokenizer.decode(whole.output_token_ids[2:3], skip_special_tokens=False)
    (cut,) = served.gather_and_generate({**greedy, "stop": [stop]}, all_prompt_token_ids=[PROMPT])
    assert served.tokenizer.decode(cut.output_token_ids[-1:], skip_special_tokens=False) == stop
    assert stop not in cut.text


@row("images and videos")
def _(_: Any, __: Path) -> None:
    image = Image.new("RGB", (4, 4))
    build = StrategyBase._build_multimodal_inputs
    (made,) = build(["a"], [[image]], [1], [[np.zeros((2, 4, 4, 3), np.uint8)]], [1])
    assert made["multi_modal_data"].keys() == {"image", "video"}


@row("`_build_multimodal_inputs(...)`")
def _(_: Any, __: Path) -> None:
    image = Image.new("RGB", (4, 4))
    made = StrategyBase._build_multimodal_inputs(["a", "b", "c"], [image, image, image], [2, 0, 1], None, None)
    assert [len(item.get("multi_modal_data", {}).get("image", [])) for item in made] == [2, 0, 1]
    with pytest.raises(ValueError, match="1"):
        StrategyBase._build_multimodal_inputs(["a"], [image, image], [1], None, None)


@row("`update_engine_weights(actor)`")
def _(served: Any, _: Path) -> None:
    served.update_engine_weights(served.trained.entry(None).model)
    assert not served.engine.needs_weights


@row("`maybe_sleep_inference_engine()`, `wakeup_inference_engine()`")
def _(served: Any, _: Path) -> None:
    for call, status in (
        (served.wakeup_inference_engine, lightrl.EngineStatus.WAKEUP),
        (served.maybe_sleep_inference_engine, lightrl.EngineStatus.SLEEPED),
    ):
        call()
        call()
        assert served.engine.status is status


@row("`maybe_offload_optimizer(optimizer)`, `maybe_load_optimizer(optimizer, device=None)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    _, optimizer = trained(strategy)
    assert strategy.maybe_offload_optimizer(optimizer) == strategy.maybe_load_optimizer(optimizer)
    with pytest.raises(ValueError, match="cuda"):
        strategy.maybe_load_optimizer(optimizer, torch.device("cuda"))


@row('`report_memory(prefix="")`')
def _(_: Any, __: Path) -> None:
    assert StrategyBase.report_memory("now")["memory/host_gb"] > 0


@row("`sync_and_clear_cache()`")
def _(_: Any, __: Path) -> None:
    StrategyBase.sync_and_clear_cache()


@row("`is_actor(model)`")
def _(served: Any, _: Path) -> None:
    assert lightrl.is_actor(served.trained.entry(None).model)
    assert not lightrl.is_actor(nn.Linear(1, 1))


# ---- AReaL -----------------------------------------------------------------------------------------------------------


def of_rows(strategy: Any) -> tuple[nn.Module, list[Tensor], Any, Any]:
    model, _ = trained(strategy)
    return model, [torch.ones(1, 2), torch.zeros(1, 2)], lambda output, _: output.pow(2).mean(), lambda _: 1.0


@row("`train_batch(data, loss_fn, loss_weight_fn)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    model, data, loss, weight = of_rows(strategy)
    expected = float(model.weight.detach().sum() ** 2 / 2)
    assert strategy.train_batch(data, loss, weight).loss == pytest.approx(expected, abs=1e-6)


@row("`eval_batch(data, loss_fn, loss_weight_fn)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    _, *given = of_rows(strategy)
    assert strategy.eval_batch(*given) == pytest.approx(strategy.train_batch(*given).loss, abs=1e-6)


@row("`forward(data)`")
def _(served: Any, _: Path) -> None:
    batches = [response_batch([(PROMPT, [5])]), response_batch([(PROMPT, [5, 6])])]
    assert [len(scores.logprobs) for scores in served.forward(batches)] == [1, 2]


@row("`step_lr_scheduler()`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    model = nn.Linear(2, 1, bias=False)
    (model, _, scheduler), *_ = strategy.prepare_models_and_optimizers(model, None, None, None, strategy.options, 4)
    strategy.train_batch([torch.ones(1, 2)], lambda output, _: output.sum(), lambda _: 1.0)
    strategy.step_lr_scheduler()
    assert scheduler.last_epoch == 1


@row("`gconfig` (`n_samples`, `greedy`, `max_new_tokens`)")
def _(_: Any, __: Path) -> None:
    made = as_params({"n_samples": 3, "greedy": True, "max_new_tokens": 5})
    assert made == SamplingParams(n=3, temperature=0.0, max_new_tokens=5)


@row("`RolloutWorkflow`")
def _(_: Any, __: Path) -> None:
    assert hasattr(lightrl.Workflow, "arun_episode")


@row("`rollout_batch`, `submit`, `wait`, `prepare_batch`, `pause`, `resume`")
def _(_: Any, __: Path) -> None:
    names = ("rollout_batch", "submit", "wait", "prepare_batch", "pause", "resume")
    assert all(callable(getattr(Rollouts, name)) for name in names)


# ---- RLinf -----------------------------------------------------------------------------------------------------------


@row("`build_optimizer(model, enable_critic_warmup=False)`")
def _(_: Any, __: Path) -> None:
    assert fresh().build_optimizer(nn.Linear(1, 1)).param_groups[0]["lr"] == 0.5


@row("`build_lr_scheduler(optimizer, optim_config=None)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    scheduler = strategy.build_lr_scheduler(strategy.build_optimizer(nn.Linear(1, 1, bias=False)), None, 4)
    assert scheduler.get_last_lr() == [0.5]


@row("`build_grad_scaler(enabled, **kwargs)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    scaler = strategy.build_grad_scaler(True, init_scale=4.0)
    model, optimizer = trained(strategy)
    strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
    assert model.weight.grad.tolist() == [[4.0, 4.0]]
    assert scaler is strategy.grad_scaler


@row("`before_micro_batch(model, is_last_micro_batch)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    model, optimizer = trained(strategy)
    with strategy.before_micro_batch(model, is_last_micro_batch=True):
        strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


@row("`optimizer_step`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    model, optimizer = trained(strategy)
    strategy.backward(model(torch.ones(1, 2)).sum(), model, optimizer)
    grad_norm, lr_list = strategy.optimizer_step(optimizer, model, None)[:2]
    assert (grad_norm, lr_list) == (pytest.approx(2**0.5), [0.5])


@row("`offload_param_and_grad`, `load_param_and_grad`, `offload_optimizer`, `load_optimizer`")
def _(_: Any, __: Path) -> None:
    strategy = fresh()
    trained(strategy)
    assert strategy.offload_param_and_grad() == strategy.load_param_and_grad("cuda:0") == 8  # two floats
    assert strategy.offload_optimizer() == strategy.load_optimizer("cuda:0")


@row("`get_model_state_dict(cpu_offload, full_state_dict)`")
def _(served: Any, _: Path) -> None:
    assert "model.embed_tokens.weight" in served.get_model_state_dict(cpu_offload=True, full_state_dict=True)


@row("`save_checkpoint(save_path, step)`, `load_checkpoint(load_path)`")
def _(_: Any, tmp_path: Path) -> None:
    strategy = fresh()
    trained(strategy)
    strategy.save_checkpoint(str(tmp_path), step=7)
    strategy.set_global_step(0)
    strategy.load_checkpoint(str(tmp_path))
    assert strategy.global_step == 7


@row("`sync_model_to_rollout()`, `set_global_step(step)`")
def _(served: Any, _: Path) -> None:
    served.set_global_step(9)
    served.sync_model_to_rollout()
    assert served.engine.version == 9
    assert isinstance(served.comm, Comm)


class OwnModel(SingleStrategy):
    """Builds its model itself."""

    def model_provider_func(self, pre_process: bool = True, post_process: bool = True) -> nn.Module:
        return nn.Linear(2, 1, bias=False)


@row("`model_provider_func()`, `setup_model_and_optimizer()`")
def _(_: Any, tmp_path: Path) -> None:
    tiny_model()[0].save_pretrained(tmp_path)
    strategy = fresh(pretrain=str(tmp_path))
    strategy.setup_model_and_optimizer()
    assert isinstance(strategy.model, Policy)
    assert strategy.trained.entry(None).model is strategy.model
    own: Any = OwnModel(1, None, 1, 1, Namespace(lr=0.5))  # type: ignore[arg-type]
    own.setup_distributed()
    own.setup_model_and_optimizer()
    own.backward(own.grad_scaler.scale(own.model(torch.ones(1, 2)).sum()), own.model, own.optimizer)
    assert own.optimizer_step(own.optimizer, own.model, own.lr_scheduler).grad_norm == pytest.approx(2**0.5)
    with pytest.raises(ValueError, match="There is no model to build: name a folder in one of pretrain, model"):
        fresh().setup_model_and_optimizer()


@row("`make_data_iterator_list(data_iterator, padding=False, vpp_size=1)`")
def _(_: Any, __: Path) -> None:
    assert [list(part) for part in fresh().make_data_iterator_list(iter([1, 2]), vpp_size=3)] == [[1, 2]] * 3
    batches = [{"attention_mask": torch.tensor(rows)} for rows in ([[1, 1, 0]], [[0, 1, 1], [1, 1, 1]])]
    (found,) = fresh().make_data_iterator_list(iter(batches), padding=True)
    assert [item["max_batch_seqlen"] for item in found] == [5, 5]  # 2 and 2 + 3 tokens
    assert all("max_batch_seqlen" not in item for item in batches)


@row("`get_forward_step_func(loss_fn=None)`")
def _(served: Any, __: Path) -> None:
    ids, mask = torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    batch = {"input_ids": ids, "attention_mask": mask}
    model = served.trained.entry(None).model
    step = served.get_forward_step_func(lambda outputs, _: -outputs["log_probs"].sum())
    outputs, finish = step(iter([batch]), model)
    loss, numbers = finish(outputs)
    found = served.forward(batch)  # each token's, where outputs have the next one's
    assert loss.item() == numbers["loss"].item() == pytest.approx(-float(found.sum()), rel=1e-5)
    loss.backward()
    model.zero_grad()


@row("`custom_forward(model, input_ids, attention_mask, ...)`")
def _(served: Any, __: Path) -> None:
    ids, mask = torch.tensor([[0, 3, 4], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    model = served.trained.entry(None).model

    def processor(logits: Any, label: Tensor) -> dict[str, Tensor]:
        return {"log_probs": logits.log_softmax(-1).gather(-1, label[:, None])[:, 0]}

    arguments = {"label": ids.roll(-1, 1)}
    found = served.custom_forward(model, ids, mask, None, False, False, True, processor, arguments)["log_probs"]
    assert torch.allclose(found[1, :2], served.forward({"input_ids": ids, "attention_mask": mask})[1, 1:], atol=1e-5)
    assert served.custom_forward(model, ids, mask).shape == (2, 3, model.hf.config.vocab_size)


@row("`offload_megatron_copy_params(optimizers)`, `load_megatron_copy_params(optimizers)`")
def _(_: Any, __: Path) -> None:
    strategy = fresh(dtype="bfloat16")
    model, optimizer = trained(strategy)
    assert optimizer.param_groups[0]["params"] == [model.weight]
    assert model.weight.dtype == torch.float32
    assert strategy.offload_param_and_grad() == strategy.load_param_and_grad() == 8  # two float32
    for optimizers in (optimizer, [optimizer]):  # tests/megatron_cpu/bfloat16_ranks.py has copies to move
        assert strategy.offload_megatron_copy_params(optimizers) == 0
        assert strategy.load_megatron_copy_params(optimizers) == 0


@row("`init_worker`, `recv_rollout_trajectories`, `compute_advantages_and_returns`, `run_training`")
def _(_: Any, __: Path) -> None:
    for trainer in (lightrl.GRPOTrainer, lightrl.PPOTrainer):
        assert all(callable(getattr(trainer, name)) for name in ("sample", "score", "compute_advantages", "train"))


@row("log-linear proximal policy")
def _(_: Any, __: Path) -> None:
    # Sampled by version 0, proximal 3, current 4: alpha = 3 / 4, -1 + 3 / 4 x (-2 + 1) = -1.75.
    row, old = torch.tensor([-2.0]), torch.tensor([0])
    found = interpolated_logprobs(row, torch.tensor([-1.0]), versions=old, proximal_version=3, current_version=4)
    assert found.tolist() == [-1.75]
    assert lightrl.GRPOConfig(algorithm=AlgorithmConfig(proximal="interpolate")).algorithm.ratio_to == "interpolate"


@row("late drop of old samples, `staleness_threshold`, `on_policy_min_ratio`")
def _(_: Any, __: Path) -> None:
    # A batch of 1 and a bound of 1: ticket 0 of version 0 must be trained in step 1, which waits for it.
    started, rules = {0: 0, 1: 1}, Rules(batch_size=1, max_staleness=1)
    assert forced_first(started, {1}, step=1, rules=rules) is None
    assert forced_first(started, {0, 1}, step=1, rules=rules) == (0,)
    # Where late groups are dropped, step 1 takes ticket 1, and step 2 drops ticket 0.
    drops = DroppingScheduler(rules)
    drops.started, drops.finished = dict(started), {1}
    assert drops.batch(1) == (1,)
    assert drops.drop_late(2) == [0]
    # With half of a batch of 2 on policy, step 2 takes ticket 3, of its own weights, in place of ticket 2.
    halves = DroppingScheduler(replace(rules, batch_size=2, on_policy_min_ratio=0.5))
    halves.started, halves.finished = {1: 1, 2: 1, 3: 2}, {1, 2}
    assert halves.batch(2) is None
    halves.finished.add(3)
    assert halves.batch(2) == (1, 3)
