"""The strategies beside what lightrl.testing.StrategyContract runs: errors, options, small members."""

from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from lightrl.comm import RankComm
from lightrl.config import GRPOConfig, OptimConfig, StrategyOptions
from lightrl.strategy import StrategyBase, create_strategy, is_actor, strategy_class
from lightrl.strategy.ddp import DDPStrategy
from lightrl.strategy.optim.optimizers import build_lr_scheduler
from lightrl.strategy.torch_native import SingleStrategy

# ---- errors ------------------------------------------------------------------------------------------------------


def single(**options: object) -> SingleStrategy:
    return SingleStrategy(0, 1.0, 1, 1, Namespace(**options) if options else None)


def test_a_misspelt_strategy_is_told_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="Unknown strategy 'fspd'. Did you mean fsdp?"):
        create_strategy(GRPOConfig(strategy="fspd"))
    with pytest.raises(ValueError, match="there is no module 'nowhere'"):
        create_strategy(GRPOConfig(strategy="nowhere.mine:Mine"))
    with pytest.raises(ValueError, match="has no 'Mine'"):
        create_strategy(GRPOConfig(strategy="lightrl.records:Mine"))
    with pytest.raises(ValueError, match="not a subclass of lightrl.StrategyBase"):
        create_strategy(GRPOConfig(strategy="lightrl.records:Prompt"))
    with pytest.raises(ValueError, match="does not implement backward, create_optimizer"):
        create_strategy(GRPOConfig(strategy="lightrl.strategy.base:StrategyBase"))


def test_auto_is_single_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert type(create_strategy(GRPOConfig())) is SingleStrategy
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert strategy_class("auto").__name__ == "FSDPStrategy"


def test_batch_arithmetic_is_checked_before_any_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    # 3 x 8 = 24; 128 lies between 120 and 144
    with pytest.raises(ValueError, match="train_batch_size 128 is not a multiple .* 3 x world size 8 = 24.*120 or 144"):
        SingleStrategy(0, 1.0, 3, 128)
    assert SingleStrategy(0, 1.0, 4, 128).accumulation_steps == 4


def test_single_refuses_a_world_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = single()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="--strategy single runs in one process, but torchrun started 2"):
        strategy.setup_distributed(timedelta(seconds=5))


def test_unknown_engine_and_missing_engine() -> None:
    with pytest.raises(ValueError, match="Unknown engine 'natve'. Did you mean native?"):
        single(engine="natve").setup_distributed()
    strategy = single()
    with pytest.raises(ValueError, match="Unknown engine 'gpu'"):
        strategy.setup_inference_engine(None, "gpu")
    with pytest.raises(NotImplementedError, match="no inference engine"):
        strategy.gather_and_generate({}, all_prompt_token_ids=[[1]])
    strategy.maybe_sleep_inference_engine()  # nothing to do without an engine
    strategy.wakeup_inference_engine()


def test_engine_generate_local_takes_exactly_one_input() -> None:
    with pytest.raises(ValueError, match="exactly one of them; neither was given"):
        single().engine_generate_local({})
    with pytest.raises(ValueError, match="exactly one of them; both was given"):
        single().engine_generate_local({}, prompt_token_ids=[[1]], multi_modal_inputs=[{"prompt": "a"}])


def test_train_batch_without_an_optimizer_or_a_micro_batch() -> None:
    strategy = single()
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="has no optimizer yet"):
        strategy.train_batch([1], lambda out, mb: out, lambda mb: 1)
    strategy.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="Give every rank at least one"):
        strategy.train_batch([], lambda out, mb: out, lambda mb: 1)


def test_train_batch_of_any_module_and_batch() -> None:
    """A user's own module, batches and loss; all weights zero leaves the parameters as they were."""
    strategy = single()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    strategy.register(model, torch.optim.SGD(model.parameters(), lr=0.1))
    strategy.max_norm = 0.0
    batches = [torch.tensor([[1.0]]), torch.tensor([[2.0], [4.0]])]
    result = strategy.train_batch(batches, lambda out, mb: out.mean(), len)
    # mean output over all three rows: 2 x (1 + 2 + 4) / 3; its gradient by the weight: 7 / 3
    assert_close(torch.tensor(result.loss), torch.tensor(14 / 3), atol=1e-6, rtol=0)
    assert_close(torch.tensor(result.grad_norm), torch.tensor(7 / 3), atol=1e-6, rtol=0)
    assert_close(model.weight.detach(), torch.tensor([[2.0 - 0.1 * 7 / 3]]), atol=1e-6, rtol=0)
    before = model.weight.detach().clone()
    strategy.train_batch(batches, lambda out, mb: out.mean(), lambda mb: 0.0)
    assert_close(model.weight.detach(), before, atol=0, rtol=0)


# ---- options and small members -----------------------------------------------------------------------------------


def test_options_from_namespace_dict_and_config(caplog: pytest.LogCaptureFixture) -> None:
    options = StrategyOptions.from_args(
        Namespace(actor_learning_rate=2e-6, adam_betas=(0.9, 0.95), l2=0.1, bf17=True, pretrain="a")
    )
    assert (options.lr, options.optim.betas, options.optim.weight_decay) == (2e-6, (0.9, 0.95), 0.1)
    assert "does not read: bf17." in caplog.text  # the model's folder is read elsewhere
    assert StrategyOptions.from_args({"fsdp": {"cpu_offload": True}}).fsdp.cpu_offload
    assert StrategyOptions.from_args(GRPOConfig(lr=3e-5)).lr == 3e-5
    assert not options.exact_batches


def test_multimodal_inputs_in_both_formats() -> None:
    build = StrategyBase._build_multimodal_inputs
    prompts = ["p", "q", "r"]
    nested = build(prompts, [["a", "b"], [], ["c"]], [2, 0, 1], None, None)
    flat = build(prompts, ["a", "b", "c"], [2, 0, 1], None, None)
    assert nested == flat
    assert nested[0] == {"prompt": "p", "multi_modal_data": {"image": ["a", "b"]}}
    assert nested[1] == {"prompt": "q"}
    one_each = build(prompts, ["a", "b", "c"], None, None, None)
    assert [item["multi_modal_data"]["image"] for item in one_each] == [["a"], ["b"], ["c"]]
    videos = build(["p"], None, None, [["v", "w"]], None)
    assert videos == [{"prompt": "p", "multi_modal_data": {"video": ["v", "w"]}}]
    with pytest.raises(ValueError, match="prompt 0 has 2 images, but its count says 1"):
        build(["p"], [["a", "b"]], [1], None, None)
    with pytest.raises(ValueError, match="3 images, but the counts \\[1, 1\\] add up to 2"):
        build(["p", "q"], ["a", "b", "c"], [1, 1], None, None)
    with pytest.raises(ValueError, match="say how many each has in images_num"):
        build(["p", "q"], ["a", "b", "c"], None, None, None)


def test_foreign_schedules_and_dataclass_args() -> None:
    assert StrategyOptions.from_args(Namespace(lr_scheduler="cosine_with_min_lr")).optim.schedule == "cosine"
    with pytest.raises(ValueError, match="Unknown learning-rate schedule 'polynomial'"):
        StrategyOptions.from_args(Namespace(lr_scheduler="polynomial"))
    assert StrategyOptions.from_args(Own(lr=0.5)).lr == 0.5


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dtype": "bf16"}, "dtype is 'bf16': choose one of float32, bfloat16"),
        ({"optim": {"name": "sgd"}}, "optim.name is 'sgd': choose one of adamw, muon"),
        ({"fsdp.reduce_dtype": "fp16"}, "fsdp.reduce_dtype is 'fp16': choose one of float32, bfloat16"),
        ({"tp_size": 0}, "--tp_size is 0: it must be at least 1"),
    ],
)
def test_a_foreign_value_is_not_taken_for_the_default(given: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StrategyOptions.from_args(given)


def test_a_switch_that_has_the_name_of_a_group_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    assert StrategyOptions.from_args(Namespace(fsdp=True, lr=0.5)) == StrategyOptions(lr=0.5)
    assert "does not read: fsdp" in caplog.text


@dataclass(slots=True)
class Own:
    """A user's own options; with slots it has no __dict__."""

    lr: float


def test_a_flush_takes_the_mean_of_what_was_accumulated() -> None:
    strategy = SingleStrategy(0, 0.0, 1, 4)
    assert strategy.accumulation_steps == 4
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for value in (1.0, 3.0):
        strategy.backward(model(torch.tensor([[value]])).sum(), model, optimizer)
    step = strategy.optimizer_step(optimizer, model, None, is_boundary=True)
    assert step.grad_norm == 2.0  # (1 + 3) / 2, not / 4
    done = []
    for value in (1.0, 3.0, 5.0, 7.0):
        strategy.backward(model(torch.tensor([[value]])).sum(), model, optimizer)
        done.append(strategy.optimizer_step(optimizer, model, None))
    assert [step.stepped for step in done] == [False, False, False, True]
    assert done[-1].grad_norm == 4.0  # (1 + 3 + 5 + 7) / 4
    strategy.backward(model(torch.tensor([[1.0]])).sum(), model, optimizer)
    assert not strategy.optimizer_step(optimizer, model, None, is_boundary=False).stepped


class WithHead(torch.nn.Module):
    """A critic's shape: an inner model, a head beside it, and a buffer that belongs to the saved state."""

    def __init__(self) -> None:
        super().__init__()
        self.hf = torch.nn.Linear(2, 2)
        self.value_head = torch.nn.Linear(2, 1)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.value_head(self.hf(batch))
        return result


def test_a_checkpoint_holds_heads_and_buffers_and_tags_round_trip(tmp_path: Path) -> None:
    strategy = single()

    def trained() -> WithHead:
        model = WithHead()
        strategy.register(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        return model

    model = trained()
    strategy.train_batch([torch.ones(1, 2)], lambda out, mb: out.sum(), len, model=model)
    model.count.fill_(3.0)
    for tag in ("100", "global_step4", "best"):
        strategy.save_ckpt(model, str(tmp_path), tag=tag, max_num=2, max_mem=0, client_state={"tag": tag})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "global_step4"]
    other = trained()
    _, client_state = strategy.load_ckpt(other, str(tmp_path))
    assert client_state == {"tag": "best"}
    for name, value in model.state_dict().items():
        assert_close(other.state_dict()[name], value, atol=0, rtol=0)
    strategy.train_batch([torch.ones(1, 2)], lambda out, mb: out.sum(), len, model=other)
    strategy.train_batch([torch.ones(1, 2)], lambda out, mb: out.sum(), len, model=model)
    assert_close(other.value_head.weight, model.value_head.weight, atol=0, rtol=0)  # its moments came too
    strategy.save_ckpt(model, str(tmp_path), tag="100", max_num=3, max_mem=0)
    assert strategy.load_ckpt(other, str(tmp_path), tag="100")[0].parent.name == "100"
    with pytest.raises(ValueError, match=r"client_state\['where'\] is a PosixPath, which cannot be loaded safely"):
        strategy.save_ckpt(model, str(tmp_path), client_state={"where": tmp_path})
    strategy.offload_optimizer()
    with pytest.raises(RuntimeError, match="optimizer's states are offloaded"):
        strategy.save_ckpt(model, str(tmp_path))


def test_a_resumed_schedule_is_that_of_the_new_options(tmp_path: Path) -> None:
    strategy = single()
    rates = []
    for lr in (1.0, 2.0):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        scheduler = build_lr_scheduler(optimizer, OptimConfig(schedule="linear"), total_steps=4)
        strategy.register(model, optimizer, scheduler)
        if rates:
            strategy.load_ckpt(model, str(tmp_path))
        strategy.train_batch([torch.ones(1, 1)], lambda out, mb: out.sum(), len, model=model)
        rates.append(optimizer.param_groups[0]["lr"])
        strategy.save_ckpt(model, str(tmp_path))
    assert rates == [0.75, 1.0]  # 1 x 3/4 after one step, 2 x 2/4 after the second


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_schedule_without_a_length_takes_the_runs_or_is_refused(kind: str) -> None:
    """Over one step, the default of before, the rate was 0 from the second step on."""
    strategy = single()
    config: Any = OptimConfig(schedule=kind)
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(ValueError, match=f"--optim.schedule {kind} depends on it: give total_steps"):
        strategy.build_lr_scheduler(optimizer, config)
    strategy.build_lr_scheduler(optimizer, OptimConfig())  # constant
    strategy.options = GRPOConfig(max_steps=4)
    scheduler = strategy.build_lr_scheduler(optimizer, config)
    rates = []
    for _ in range(4):
        optimizer.step()
        scheduler.step()
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
    assert rates == ([0.75, 0.5, 0.25, 0.0] if kind == "linear" else [0.853553, 0.5, 0.146447, 0.0])


def test_gradients_left_offloaded_are_dropped() -> None:
    strategy = single()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy.register(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    strategy.offload_param_and_grad(offload_grad=True)
    strategy.load_param_and_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    strategy.offload_param_and_grad(offload_grad=True)
    strategy.load_param_and_grad(load_grad=True)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]


def test_is_actor() -> None:
    model = torch.nn.Linear(1, 1)
    assert not is_actor(model)
    model.is_actor = True  # type: ignore[assignment]
    assert is_actor(model)


def test_random_streams_differ_by_role_and_repeat() -> None:
    strategy = single()
    draws = [torch.rand(1, generator=strategy.random_stream(role)).item() for role in ("a", "b", "a")]
    assert draws[0] == draws[2] != draws[1]


def test_seeds_and_the_deterministic_mode() -> None:
    strategy = single(distributed={"deterministic": True})
    try:
        strategy.set_seed(5)
        assert torch.are_deterministic_algorithms_enabled()
        first = torch.rand(1)
        single().set_seed(5)
        assert torch.are_deterministic_algorithms_enabled()  # another strategy leaves the user's own setting alone
        assert torch.equal(first, torch.rand(1))
    finally:
        torch.use_deterministic_algorithms(False)


def test_print_says_it_once_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    StrategyBase.print("hello", 3)
    assert capsys.readouterr().out.rstrip().endswith("] hello 3")


def test_the_training_engines_loop_steps_its_schedule_once_per_update() -> None:
    """train_batch has stepped it already, unless the update was skipped, which does not count."""
    strategy = single()
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy.register(model, optimizer, build_lr_scheduler(optimizer, OptimConfig(schedule="linear"), total_steps=10))
    rates = []
    for value in (1.0, 1.0, float("nan"), 1.0):
        strategy.train_batch([torch.tensor([[value]])], lambda out, mb: out.sum(), len)
        strategy.step_lr_scheduler()
        rates.append(round(optimizer.param_groups[0]["lr"], 6))
    assert rates == [0.9, 0.8, 0.8, 0.7]
    strategy.step_lr_scheduler()  # nothing was trained since the last call, so the caller means another step
    strategy.optimizer_step(optimizer, model, None, is_boundary=True)  # a loop that keeps its schedule to itself
    strategy.step_lr_scheduler()
    assert round(optimizer.param_groups[0]["lr"], 6) == 0.5
    strategy.options.optim.schedule_unit = "rl_step"
    for _ in range(2):
        strategy.train_batch([torch.tensor([[1.0]])], lambda out, mb: out.sum(), len)
    strategy.step_lr_scheduler()
    assert round(optimizer.param_groups[0]["lr"], 6) == 0.4


@pytest.mark.parametrize("is_joined_first", [True, False])
def test_an_existing_group_counts_without_the_environment_of_torchrun(
    is_joined_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join() -> None:
        for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0)):
            monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("lightrl.comm.connect", lambda device, timeout: RankComm())
    if is_joined_first:
        join()
    strategy = DDPStrategy(0, 1.0, 1, 4)
    join()
    strategy.setup_distributed()
    assert strategy.accumulation_steps == 2  # 4 samples, of which 2 ranks run 1 at a time


def test_a_memory_report_needs_no_other_rank_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = single()
    strategy.comm.all_reduce = strategy.comm.all_gather_object = None  # type: ignore[assignment, method-assign]
    with strategy.init_model_context():
        pass
    assert StrategyBase.report_memory("after the update")["memory/host_gb"] > 0
    first, second = capsys.readouterr().out.splitlines()
    assert "] model built: memory/host_gb " in first
    assert "] after the update: memory/host_gb " in second
