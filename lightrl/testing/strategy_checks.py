"""The checks of StrategyContract besides parity, which run one after another on all ranks at once.

A check raises on the rank that finds something; the program then ends, and torchrun ends the other ranks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from lightrl.comm import RankError
from lightrl.data.packing import unpack
from lightrl.engines.base import WeightSyncError
from lightrl.records import PackedBatch, TokenScores
from lightrl.strategy.base import StrategyBase
from lightrl.testing.skipped_updates import check_updates_that_are_not_made
from lightrl.testing.tiny_training import (
    EVERYTHING,
    StaleSource,
    counted_reductions,
    differ,
    expect,
    fresh,
    loss_fn,
    make_batch,
    my_batches,
    num_tokens,
    parameters,
    same,
    samples,
    tiny_policy,
    train,
)

VICTIM = "model.layers.1.mlp.down_proj.weight"


# ---- Weights -----------------------------------------------------------------------------------------------------


def check_same_weights_everywhere(strategy: StrategyBase) -> None:
    """Checks that ranks built from different seeds get rank 0's weights, under Hugging Face names, tied ones once."""
    policy, _ = fresh(strategy, seed=strategy.comm.rank)
    alone = dict(tiny_policy(seed=0).hf.named_parameters())
    found = parameters(strategy, policy)
    assert list(found) == sorted(alone)
    assert "lm_head.weight" not in found
    same(found, {name: value.detach() for name, value in alone.items()})
    train(strategy, policy, 0)
    sums = {name: float(value.double().sum()) for name, value in parameters(strategy, policy).items()}
    assert all(item == sums for item in strategy.comm.all_gather_object(sums))
    unwrapped: Any = strategy.unwrap_model(policy)
    assert unwrapped.lm_head.weight is unwrapped.model.embed_tokens.weight


def check_state_dict_modes(strategy: StrategyBase) -> None:
    """Checks the state dict in each mode: whole or this rank's part, copied or live."""
    policy, _ = fresh(strategy)
    expected = parameters(strategy, policy)
    full = strategy.get_model_state_dict(cpu_offload=True, full_state_dict=True, model=policy)
    same(full, expected)
    everywhere = strategy.get_model_state_dict(cpu_offload=False, full_state_dict=True, model=policy)
    same({name: value.cpu() for name, value in everywhere.items()}, expected)
    live = strategy.get_model_state_dict(cpu_offload=False, full_state_dict=False, model=policy)
    copied = strategy.get_model_state_dict(cpu_offload=True, full_state_dict=False, model=policy)
    total = strategy.comm.all_reduce(sum(value.numel() for value in live.values()), "sum")
    size = sum(value.numel() for value in expected.values())
    assert size <= total <= size * strategy.comm.world, (total, size)  # shards of it, the whole on every rank, or both
    before = {name: value.clone() for name, value in copied.items()}
    train(strategy, policy, 0)
    assert any(not torch.equal(live[name].cpu(), before[name]) for name in live if live[name].numel())
    same(copied, before)
    same(full, expected)


def check_export(strategy: StrategyBase, folder: Path) -> None:
    """Writes a folder that from_pretrained loads; the test that started this program compares it with the file."""
    policy, _ = fresh(strategy)
    train(strategy, policy, 0)
    strategy.save_pretrained(policy, folder / "hf")
    full = parameters(strategy, policy)
    if strategy.comm.is_main:
        torch.save(full, folder / "exported.pt")


def check_engine_weights(strategy: StrategyBase) -> None:
    """Checks that the engine gets the trained weights, generates from them on every rank, and refuses stale ones."""
    policy, _ = fresh(strategy)
    train(strategy, policy, 0)
    strategy.set_global_step(1)
    strategy.setup_inference_engine(None, "native", actor=policy)
    assert strategy.serving.last_sync is not None
    assert strategy.serving.last_sync.canary is not None
    assert strategy.serving.last_sync.canary < 1e-4
    alone = tiny_policy()
    alone.hf.load_state_dict(parameters(strategy, policy), strict=False)  # lm_head is not among them: it is tied
    alone.hf.set_attn_implementation("eager")
    prompts = [[5, 9, 33], [7]] if strategy.comm.is_main else []  # none on the other ranks
    items = strategy.gather_and_generate({"max_tokens": 4, "temperature": 0.0}, all_prompt_token_ids=prompts)
    assert len(items) == len(prompts)
    for item in items:
        assert item.output_token_ids == greedy(alone.hf, item.prompt_token_ids, len(item.output_token_ids))
    honest = strategy.serving.source
    strategy.serving.source = StaleSource(honest, VICTIM)
    expect((WeightSyncError, RankError), VICTIM, lambda: strategy.update_engine_weights(policy))
    strategy.serving.source = honest
    strategy.update_engine_weights(policy)
    assert strategy.engine is not None
    strategy.engine.close()
    strategy.serving.engine = None


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Returns the most likely tokens after a prompt, according to the model."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# ---- Updates -----------------------------------------------------------------------------------------------------


def check_global_norm_and_clipping(strategy: StrategyBase) -> None:
    """Checks that the norm covers all parameters and ranks: SGD at rate 1 then moves them by exactly max_norm."""
    policy, _ = fresh(strategy, make_optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
    before = parameters(strategy, policy)
    strategy.max_norm = 0.5

    def huge_loss(scores: TokenScores, batch: PackedBatch) -> Tensor:
        return 1e6 * loss_fn(scores, batch)

    huge = strategy.train_batch(my_batches(strategy, 0), huge_loss, num_tokens, model=policy)
    moved = [value - before[name] for name, value in parameters(strategy, policy).items()]
    assert huge.grad_norm > 1e5
    assert_close(torch.stack([change.norm() for change in moved]).norm(), torch.tensor(0.5), atol=1e-4, rtol=0)
    norms = strategy.comm.all_gather_object(huge.grad_norm)
    assert norms == [norms[0]] * len(norms)


def check_nan_on_one_rank(strategy: StrategyBase) -> None:
    """Checks that all ranks skip and report the update and change nothing, and that the next step is ordinary."""
    policy, _ = fresh(strategy)
    reference, _ = fresh(strategy)
    train(strategy, policy, 0)
    train(strategy, reference, 0)
    before = parameters(strategy, policy)
    is_last = strategy.comm.rank == strategy.comm.world - 1

    def poisoned(scores: TokenScores, batch: PackedBatch) -> Tensor:
        return loss_fn(scores, batch) * (math.nan if is_last else 1.0)

    scaler = strategy.build_grad_scaler(True, init_scale=1024.0)
    result = strategy.train_batch(my_batches(strategy, 1), poisoned, num_tokens, model=policy)
    assert result.skipped
    assert not math.isfinite(result.grad_norm)
    assert scaler.get_scale() == 512.0  # on the ranks that had no NaN too
    same(parameters(strategy, policy), before)
    scaled = train(strategy, policy, 2)
    strategy.build_grad_scaler(False)
    plain = train(strategy, reference, 2)
    assert not scaled.skipped  # the NaN is gone with its step, from the moments too
    assert_close((scaled.loss, scaled.grad_norm), (plain.loss, plain.grad_norm), atol=1e-6, rtol=1e-5)
    wanted = parameters(strategy, reference)
    for name, value in parameters(strategy, policy).items():
        assert_close(value, wanted[name], atol=1e-5, rtol=0)


def check_one_reduction_per_update(strategy: StrategyBase) -> None:
    """Checks that several micro-batches need no more gradient collectives than one batch."""
    if strategy.comm.world == 1:
        return
    counts = []
    for size in (1, EVERYTHING):
        policy, _ = fresh(strategy)
        mine = samples(0)[strategy.comm.rank :: strategy.comm.world][:4]
        batches = [make_batch(mine[i : i + size]).to(strategy.device) for i in range(0, 4, size)]
        with counted_reductions() as calls:
            strategy.train_batch(batches, loss_fn, num_tokens, model=policy)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0, counts


def check_accumulation_by_calls(strategy: StrategyBase) -> None:
    """Checks backward and optimizer_step per micro-batch, with an update every accumulation_steps calls."""
    policy, optimizer = fresh(strategy)
    mine = my_batches(strategy, 0)[:2]
    batches = strategy.group_batches(mine).batches
    strategy.accumulation_steps = len(batches)
    for batch in batches:
        before = parameters(strategy, policy)
        strategy.backward(loss_fn(policy(batch), batch), policy, optimizer)
        step = strategy.optimizer_step(optimizer, policy, None)
        assert step.stepped == differ(parameters(strategy, policy), before) == (batch is batches[-1])
    # train_batch makes the same update if all micro-batches have the same weight.
    other, _ = fresh(strategy)
    result = strategy.train_batch(mine, loss_fn, lambda batch: 1.0, model=other)
    assert_close(step.grad_norm, result.grad_norm, atol=1e-6, rtol=1e-5)
    # An early flush takes the mean of the micro-batches so far.
    early, optimizer = fresh(strategy)
    for batch in strategy.group_batches(mine[:1]).batches:
        strategy.backward(loss_fn(early(batch), batch), early, optimizer)
    flushed = strategy.optimizer_step(optimizer, early, None, is_boundary=True)
    single, _ = fresh(strategy)
    result = strategy.train_batch(mine[:1], loss_fn, lambda batch: 1.0, model=single)
    assert_close(flushed.grad_norm, result.grad_norm, atol=1e-6, rtol=1e-5)
    strategy.accumulation_steps = 1


# ---- Forward -----------------------------------------------------------------------------------------------------


def check_forward_restores_order(strategy: StrategyBase) -> None:
    """Checks that logprobs do not depend on the split; the reference is one sample at a time in this process."""
    policy, _ = fresh(strategy)
    mine = samples(0)[strategy.comm.rank :: strategy.comm.world]
    found: dict[Any, Any] = {}
    batches = my_batches(strategy, 0)
    for batch, scores in zip(batches, strategy.forward(batches, model=policy), strict=True):
        found.update(unpack(batch, scores.logprobs))
    alone = tiny_policy(seed=0)
    for item in mine:
        expected = alone(make_batch([item])).logprobs.detach()
        assert_close(found[(item.sample.position, 0)].cpu(), expected, atol=1e-5, rtol=0)
    assert policy.training


def check_eval_batch(strategy: StrategyBase) -> None:
    """Checks that evaluation gives the loss that training on the same batches reports."""
    policy, _ = fresh(strategy)
    evaluated = strategy.eval_batch(my_batches(strategy, 0), loss_fn, num_tokens, model=policy)
    assert_close(evaluated, train(strategy, policy, 0).loss, atol=1e-6, rtol=0)


def check_several_models(strategy: StrategyBase) -> None:
    """Checks that an actor and a critic train, and a reward and a reference model run, each as if it were alone."""
    prepared = strategy.prepare_models_and_optimizers(
        tiny_policy(), tiny_policy(seed=4), [tiny_policy(seed=2)], tiny_policy(seed=3), None, 10
    )
    (actor, optimizer, scheduler), (critic, _, _), (reward,), initial = prepared
    assert scheduler.optimizer is optimizer
    assert not any(p.requires_grad for model in (reward, initial) for p in model.parameters())
    batches = my_batches(strategy, 0)
    for _ in range(2):
        for model, seed in ((reward, 2), (initial, 3)):
            scores = strategy.forward(batches, model=model)[0].logprobs
            assert_close(
                scores.cpu(), tiny_policy(seed=seed)(batches[0].to(torch.device("cpu"))).logprobs, atol=1e-5, rtol=0
            )
        before = parameters(strategy, critic)
        assert train(strategy, actor, 0).grad_norm > 0
        same(parameters(strategy, critic), before)
        assert train(strategy, critic, 0).grad_norm > 0
        assert differ(parameters(strategy, critic), before)
    same(parameters(strategy, initial), dict(tiny_policy(seed=3).hf.named_parameters()))
    frozen = strategy.prepare(tiny_policy(seed=1), is_rlhf=True)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert strategy.prepare(None) is None
    policy = tiny_policy()
    policy, optimizer = strategy.prepare((policy, strategy.create_optimizer(policy)))  # made before, used after
    before = parameters(strategy, policy)
    train(strategy, policy, 0)
    assert differ(parameters(strategy, policy), before)


# ---- Offload -----------------------------------------------------------------------------------------------------


def check_offload(strategy: StrategyBase) -> None:
    """Checks that offload is bit-equal and idempotent, frees memory, and does not change the training."""
    reference, _ = fresh(strategy)
    wanted = [train(strategy, reference, step) for step in range(3)]
    strategy.trained.entries.clear()
    policy, optimizer = fresh(strategy)
    strategy.maybe_offload_optimizer(optimizer)  # before the first step there may be nothing to move
    strategy.maybe_load_optimizer(optimizer)
    size = sum(value.nbytes for value in parameters(strategy, policy).values())
    for step in range(3):
        before = parameters(strategy, policy)
        freed_states = strategy.offload_optimizer()
        assert freed_states * strategy.comm.world >= (2 * size if step else 0), freed_states  # two moments
        freed = strategy.offload_param_and_grad()
        assert freed * strategy.comm.world >= size, freed
        assert strategy.offload_param_and_grad() == 0
        expect(RuntimeError, "weights are offloaded", lambda: policy(make_batch([]).to(strategy.device)))
        expect(RuntimeError, "weights are offloaded", lambda: parameters(strategy, policy))
        assert strategy.load_param_and_grad() == freed
        assert strategy.load_param_and_grad() == 0
        if step:
            expect(RuntimeError, "optimizer's states are offloaded", lambda: train(strategy, policy, 0))
        assert strategy.load_optimizer() == freed_states
        same(parameters(strategy, policy), before)
        found = train(strategy, policy, step)
        assert (found.loss, found.grad_norm) == (wanted[step].loss, wanted[step].grad_norm)
    same(parameters(strategy, policy), parameters(strategy, reference))
    expect(ValueError, "cannot be loaded to", lambda: strategy.maybe_load_optimizer(optimizer, torch.device("meta")))


def check_offloaded_gradients(strategy: StrategyBase) -> None:
    """Checks that gradients of an unfinished accumulation survive an offload, or are dropped, as the caller says."""

    def update(first: float, between: Callable[[], object]) -> dict[str, Tensor]:
        strategy.trained.entries.clear()
        policy, optimizer = fresh(strategy)
        for index, batch in enumerate(strategy.group_batches(my_batches(strategy, 0)[:2]).batches[:2]):
            with strategy.before_micro_batch(policy, True):
                weight = 0.5 if index else first
                strategy.backward(loss_fn(policy(batch), batch), policy, optimizer, weight=weight)
            if not index:
                between()
        strategy.optimizer_step(optimizer, policy, None, is_boundary=True)
        return parameters(strategy, policy)

    def offload(load_grad: bool) -> None:
        strategy.offload_param_and_grad(offload_grad=True)
        strategy.load_param_and_grad(load_grad=load_grad)

    same(update(0.5, lambda: offload(True)), update(0.5, lambda: None))
    same(update(0.5, lambda: offload(False)), update(0.0, lambda: None))


# ---- Checkpoints -------------------------------------------------------------------------------------------------


def check_checkpoint(strategy: StrategyBase) -> None:
    """Checks that 4 steps equal 2 steps, save, load into fresh objects, and 2 steps; and that flags are honoured."""
    reference, _ = fresh(strategy)
    wanted = [train(strategy, reference, step) for step in range(4)]
    policy, _ = fresh(strategy)
    for step in range(2):
        train(strategy, policy, step)
    folder = strategy.comm.broadcast_object(tempfile.mkdtemp())
    strategy.set_global_step(2)
    strategy.save_ckpt(policy, folder, client_state={"cursor": [1, 2], "name": "x"}, max_mem=0)
    strategy.options.checkpoint.asynchronous = True
    strategy.save_ckpt(policy.hf, folder, tag="best", max_mem=0)  # a module inside stands for the model
    strategy.options.checkpoint.asynchronous = False

    other, _ = fresh(strategy, seed=5)
    path, client_state = strategy.load_ckpt(other, folder, tag="step-000002")
    assert client_state == {"cursor": [1, 2], "name": "x"}
    assert Path(path).name == "step-000002"
    assert strategy.global_step == 2
    same(parameters(strategy, other), parameters(strategy, policy))
    for step in (2, 3):
        found = train(strategy, other, step)
        assert (found.loss, found.grad_norm) == (wanted[step].loss, wanted[step].grad_norm)
    same(parameters(strategy, other), parameters(strategy, reference))
    draws = []
    for _ in range(2):
        strategy.load_ckpt(other.hf, folder, tag="best")
        draws.append(torch.rand(3))
    assert_close(draws[0], draws[1], atol=0, rtol=0)  # the RNG state came with it
    train(strategy, other, 2)
    assert train(strategy, other, 3).loss == wanted[3].loss  # so did the optimizer's states

    only_weights, _ = fresh(strategy, seed=5)
    strategy.load_ckpt(only_weights, folder, tag="step-000002", load_module_only=True)
    same(parameters(strategy, only_weights), parameters(strategy, policy))
    train(strategy, only_weights, 2)
    assert differ(parameters(strategy, only_weights), parameters(strategy, other))  # its moments began anew
    expect(FileNotFoundError, "no complete checkpoint", lambda: load_on_one(strategy, other, folder, "step-000009"))
    assert strategy.load_ckpt(other, folder + "/nothing") == (None, None)


def load_on_one(strategy: StrategyBase, policy: nn.Module, folder: str, tag: str) -> None:
    """Loads a checkpoint, and raises FileNotFoundError on every rank if it is missing."""
    try:
        strategy.load_ckpt(policy, folder, tag=tag)
    except RankError as error:  # only rank 0 looks for the folder
        raise FileNotFoundError(str(error)) from error


def check_save_for_others(strategy: StrategyBase, folder: Path) -> None:
    """Saves a checkpoint that train_on_from() reads at another world size and under another strategy."""
    policy, _ = fresh(strategy)
    for step in range(2):
        train(strategy, policy, step)
    strategy.set_global_step(2)
    strategy.save_ckpt(policy, str(folder / "checkpoint"), max_mem=0)


def train_on_from(strategy: StrategyBase, folder: Path) -> list[tuple[float, float]]:
    """Returns (loss, gradient norm) of two more steps, whichever strategy wrote the checkpoint."""
    policy, _ = fresh(strategy, seed=5)
    path, _ = strategy.load_ckpt(policy, str(folder / "checkpoint"))
    assert path is not None, folder
    results = [train(strategy, policy, step) for step in (2, 3)]
    return [(result.loss, result.grad_norm) for result in results]


# ---- Small members -----------------------------------------------------------------------------------------------


def check_small_members(strategy: StrategyBase) -> None:
    """Checks that ranks, memory reports and data loaders fit the world."""
    assert strategy.get_rank() == strategy.comm.rank
    assert strategy.is_rank_0() == (strategy.comm.rank == 0)
    if strategy.is_rank_0():  # on this rank alone
        assert strategy.report_memory("test")["memory/host_gb"] > 0
    strategy.sync_and_clear_cache()
    loader = strategy.setup_dataloader(list(range(10)), batch_size=2, shuffle=False, drop_last=False)
    seen = [int(item) for batch in loader for item in batch]
    assert sorted(item for part in strategy.comm.all_gather_object(seen) for item in part) == list(range(10))


CHECKS: list[Callable[[StrategyBase], None]] = [
    check_same_weights_everywhere,
    check_state_dict_modes,
    check_global_norm_and_clipping,
    check_nan_on_one_rank,
    check_updates_that_are_not_made,
    check_accumulation_by_calls,
    check_forward_restores_order,
    check_eval_batch,
    check_several_models,
    check_offload,
    check_offloaded_gradients,
    check_checkpoint,
    check_engine_weights,
    check_small_members,
]

# The checks that never call the model itself, which a rank with only some of its layers cannot run.
_CALLS = (check_updates_that_are_not_made, check_accumulation_by_calls, check_offloaded_gradients)
CHECKS_BY_BATCHES = [check for check in CHECKS if check not in _CALLS]
