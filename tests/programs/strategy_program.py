"""Run on 2 ranks (or 1 with "single"): the parts of the strategy contract that are not training parity."""

import math
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tiny_training import adamw, loss_fn, make_batch, num_tokens, samples, tiny_policy, whole
from torch.testing import assert_close

from lightrl.comm import RankError
from lightrl.config import GRPOConfig
from lightrl.data.packing import unpack
from lightrl.strategy import create_strategy


def expect(error_type, text, function):
    try:
        function()
    except error_type as error:
        assert text in str(error), f"{text!r} not in {error}"
        return
    raise AssertionError(f"no {error_type.__name__} with {text!r}")


def exact(actual, wanted):
    assert_close(actual, wanted, atol=0, rtol=0)


def my_batches(strategy, step, size=2):
    mine = samples(step)[strategy.comm.rank :: strategy.comm.world]
    return [make_batch(mine[i : i + size]) for i in range(0, len(mine), size)]


def fresh(strategy, seed=0):
    policy = strategy.prepare_model(tiny_policy(seed=seed))
    optimizer = adamw(policy.parameters())
    strategy.register(policy, optimizer)
    return policy, optimizer


def parameters(strategy, policy):
    return {name: tensor.clone() for name, tensor in strategy.full_parameters(policy)}


def train(strategy, policy, step):
    return strategy.train_batch(my_batches(strategy, step), loss_fn, num_tokens, model=policy)


def check_same_weights_everywhere(strategy):
    """Row 1: each rank builds from another seed; all end with rank 0's, under the HF names, tied ones once."""
    policy, _ = fresh(strategy, seed=strategy.comm.rank)
    alone = dict(tiny_policy(seed=0).hf.named_parameters())
    found = parameters(strategy, policy)
    assert list(found) == sorted(alone)
    assert "lm_head.weight" not in found
    for name, value in found.items():
        exact(value, alone[name].detach())
    hashes = strategy.comm.all_gather_object({name: float(value.double().sum()) for name, value in found.items()})
    assert all(item == hashes[0] for item in hashes)
    unwrapped = strategy.unwrap_model(policy)
    assert unwrapped.lm_head.weight is unwrapped.model.embed_tokens.weight


def check_global_norm_clipping_and_skip(strategy):
    """Row 5."""
    policy, optimizer = fresh(strategy)
    strategy.max_norm = 0.5
    gradients = {}

    def capture(*_):
        gradients.update({name: whole(p.grad).clone() for name, p in strategy.named_parameters_of(policy)})

    optimizer.register_step_pre_hook(capture)
    huge = strategy.train_batch(
        my_batches(strategy, 0), lambda scores, batch: 1e6 * loss_fn(scores, batch), num_tokens, model=policy
    )
    after = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert huge.grad_norm > 1e5
    assert_close(after, torch.tensor(0.5), atol=1e-4, rtol=0)
    norms = strategy.comm.all_gather_object(huge.grad_norm)
    assert norms == [norms[0]] * len(norms)

    before = parameters(strategy, policy)
    last = strategy.comm.rank == strategy.comm.world - 1

    def poisoned(scores, batch):
        return loss_fn(scores, batch) * (math.nan if last else 1.0)

    scaler = strategy.build_grad_scaler(True, init_scale=1024.0)
    result = strategy.train_batch(my_batches(strategy, 1), poisoned, num_tokens, model=policy)
    assert result.skipped
    assert scaler.get_scale() == 512.0  # on the ranks that had no NaN too
    strategy.build_grad_scaler(False)
    for name, value in parameters(strategy, policy).items():
        exact(value, before[name])
    assert not train(strategy, policy, 2).skipped  # the NaN is gone with its step
    assert all(value.isfinite().all() for value in parameters(strategy, policy).values())


def check_one_reduction_per_update(strategy):
    """Row 6: gradients are reduced in the last micro-batch only."""
    if strategy.comm.world == 1:
        return
    counts = []
    for size in (1, 99):
        policy, _ = fresh(strategy)
        calls = []
        names = ("reduce_scatter_tensor", "reduce_scatter_single")  # the second since torch 2.13
        wrapped = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
        for name, function in wrapped.items():

            def counting(*args, _function=function, **kwargs):
                calls.append(1)
                return _function(*args, **kwargs)

            setattr(dist, name, counting)
        try:
            mine = samples(0)[strategy.comm.rank :: 2][:4]
            batches = [make_batch(mine[i : i + size]) for i in range(0, 4, size)]
            strategy.train_batch(batches, loss_fn, num_tokens, model=policy)
        finally:
            for name, function in wrapped.items():
                setattr(dist, name, function)
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0, counts


def check_state_dict_modes(strategy):
    """Row 8: full or sharded, copied or live."""
    policy, _ = fresh(strategy)
    full = strategy.get_model_state_dict(cpu_offload=True, full_state_dict=True, model=policy)
    expected = parameters(strategy, policy)
    for name, value in full.items():
        exact(value, expected[name])
    live = strategy.get_model_state_dict(cpu_offload=False, full_state_dict=False, model=policy)
    copied = strategy.get_model_state_dict(cpu_offload=True, full_state_dict=False, model=policy)
    total = strategy.comm.all_reduce(sum(value.numel() for value in live.values()), "sum")
    assert total == sum(value.numel() for value in expected.values())
    before = {name: value.clone() for name, value in copied.items()}
    train(strategy, policy, 0)
    assert any(not torch.equal(live[name], before[name]) for name in live if live[name].numel())
    for name, value in copied.items():
        exact(value, before[name])
    for name, value in full.items():
        exact(value, expected[name])


def check_offload(strategy):
    """Rows 2 to 4: bit-equal, idempotent, memory really freed, training as if nothing had happened."""
    policy, optimizer = fresh(strategy)
    strategy._trained = [entry for entry in strategy._trained if entry.model is policy]
    strategy.maybe_offload_optimizer(optimizer)  # before the first step there is nothing to move
    strategy.maybe_load_optimizer(optimizer)
    reference, _ = fresh(strategy)
    for step in range(3):
        wanted = train(strategy, reference, step)
        before = parameters(strategy, policy)
        strategy.offload_optimizer()
        strategy.offload_param_and_grad()
        strategy.offload_param_and_grad()  # idempotent
        assert all(t.untyped_storage().nbytes() == 0 for t in local_parameters(policy))
        expect(RuntimeError, "weights are offloaded", lambda: train(strategy, policy, 0))
        expect(RuntimeError, "weights are offloaded", lambda: parameters(strategy, policy))
        strategy.load_param_and_grad()
        strategy.load_param_and_grad()
        if step:
            expect(RuntimeError, "optimizer's states are offloaded", lambda: train(strategy, policy, 0))
            for parameter in policy.parameters():
                parameter.grad = None
        strategy.load_optimizer()
        for name, value in parameters(strategy, policy).items():
            exact(value, before[name])
        found = train(strategy, policy, step)
        assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)
    expect(ValueError, "cannot be loaded to", lambda: strategy.maybe_load_optimizer(optimizer, torch.device("meta")))


def local_parameters(policy):
    return [p.to_local() if hasattr(p, "to_local") else p for p in policy.parameters()]


def check_offloaded_gradients(strategy):
    """Row 3: gradients kept over an offload between two micro-batches."""

    def accumulate(offload):
        policy, optimizer = fresh(strategy)
        strategy._trained = [entry for entry in strategy._trained if entry.model is policy]
        batches = my_batches(strategy, 0)[:2]
        for place, batch in enumerate(batches):
            with strategy.before_micro_batch(policy, True):
                strategy.backward(loss_fn(policy(batch), batch), policy, optimizer, weight=0.5)
            if place == 0 and offload:
                strategy.offload_param_and_grad(offload_grad=True)
                strategy.load_param_and_grad(load_grad=True)
        return [whole(p.grad).clone() for _, p in strategy.named_parameters_of(policy)]

    for kept, plain in zip(accumulate(True), accumulate(False), strict=True):
        exact(kept, plain)


def check_accumulation_by_calls(strategy):
    """The seed's way: backward and optimizer_step per micro-batch, an update every accumulation_steps calls."""
    strategy.accumulation_steps = 2
    policy, optimizer = fresh(strategy)
    batches = my_batches(strategy, 0)[:2]
    for batch in batches:
        before = parameters(strategy, policy)
        strategy.backward(loss_fn(policy(batch), batch), policy, optimizer)
        step = strategy.optimizer_step(optimizer, policy, None)
        changed = any(not torch.equal(v, before[n]) for n, v in parameters(strategy, policy).items())
        assert step.stepped == changed == (batch is batches[-1])
    assert step.grad_norm > 0
    # The same update by train_batch when every micro-batch weighs the same.
    other, _ = fresh(strategy)
    result = strategy.train_batch(batches, loss_fn, lambda batch: 1.0, model=other)
    assert_close(step.grad_norm, result.grad_norm, atol=1e-6, rtol=1e-5)
    strategy.accumulation_steps = 1


def check_forward_restores_order(strategy):
    """Row 34: per-sample logprobs do not depend on the split; the reference is the plain padded forward."""
    policy, _ = fresh(strategy)
    everything = samples(0)
    mine = everything[strategy.comm.rank :: strategy.comm.world]
    found = {}
    batches = my_batches(strategy, 0)
    for batch, scores in zip(batches, strategy.forward(batches, model=policy), strict=True):
        found.update(unpack(batch, scores.logprobs))
    alone = tiny_policy(seed=0)
    for item in mine:
        batch = make_batch([item])
        assert_close(found[(item.sample.position, 0)], alone(batch).logprobs.detach(), atol=1e-5, rtol=0)
    assert policy.training


def check_eval_batch(strategy):
    policy, _ = fresh(strategy)
    evaluated = strategy.eval_batch(my_batches(strategy, 0), loss_fn, num_tokens, model=policy)
    assert_close(evaluated, train(strategy, policy, 0).loss, atol=1e-6, rtol=0)


def check_checkpoint(strategy):
    """Row 9: 4 steps equal 2 steps, save, load into fresh objects, 2 steps; flags are honoured."""
    reference, _ = fresh(strategy)
    wanted = [train(strategy, reference, step) for step in range(4)]
    policy, _ = fresh(strategy)
    for step in range(2):
        train(strategy, policy, step)
    folder = strategy.comm.broadcast_object(tempfile.mkdtemp())
    strategy.set_global_step(2)
    strategy.save_ckpt(policy, folder, client_state={"cursor": [1, 2], "name": "x"}, max_mem=0)
    strategy.save_ckpt(policy, folder, tag="best", max_mem=0)

    other, optimizer = fresh(strategy, seed=5)
    path, client_state = strategy.load_ckpt(other, folder, tag="step-000002")
    assert client_state == {"cursor": [1, 2], "name": "x"}
    assert Path(path).name == "step-000002"
    assert strategy.global_step == 2
    for step in (2, 3):
        found = train(strategy, other, step)
        assert (found.loss, found.grad_norm) == (wanted[step].loss, wanted[step].grad_norm)
    draws = []
    for _ in range(2):
        strategy.load_ckpt(other, folder, tag="best")
        draws.append(torch.rand(3))
    exact(draws[0], draws[1])  # the RNG state came with it

    only_weights, optimizer = fresh(strategy, seed=5)
    strategy.load_ckpt(only_weights, folder, tag="step-000002", load_module_only=True)
    assert not optimizer.state
    expect(FileNotFoundError, "no complete checkpoint", lambda: load_on_one(strategy, other, folder, "step-000009"))
    assert strategy.load_ckpt(other, folder + "/nothing") == (None, None)


def load_on_one(strategy, policy, folder, tag):
    try:
        strategy.load_ckpt(policy, folder, tag=tag)
    except RankError as error:  # rank 0 looks, the others hear of it
        raise FileNotFoundError(str(error)) from error


def check_export(strategy, output):
    """A HF folder that from_pretrained loads, with the weights of the trained model."""
    policy, _ = fresh(strategy)
    train(strategy, policy, 0)
    strategy.save_pretrained(policy, f"{output}/hf")
    full = parameters(strategy, policy)
    if strategy.comm.is_main:
        save_file(full, f"{output}/trained.safetensors")


def check_contract_helpers(strategy):
    assert strategy.get_rank() == strategy.comm.rank
    assert strategy.is_rank_0() == (strategy.comm.rank == 0)
    report = strategy.report_memory("test")
    assert 0 < report["memory/host_gb/min"] <= report["memory/host_gb/mean"] <= report["memory/host_gb/max"]
    strategy.sync_and_clear_cache()
    frozen = strategy.prepare(tiny_policy(seed=1), is_rlhf=True)
    assert not any(p.requires_grad for p in frozen.parameters())
    assert strategy.prepare(None) is None
    policy = tiny_policy()
    optimizer = strategy.create_optimizer(policy)
    policy, optimizer = strategy.prepare((policy, optimizer))  # made before sharding, used after it
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in policy.parameters()}
    trained = strategy.train_batch(my_batches(strategy, 0), loss_fn, num_tokens, model=policy)
    assert trained.grad_norm > 0
    (actor, actor_optimizer, actor_scheduler), critic, rewards, initial = strategy.prepare_models_and_optimizers(
        tiny_policy(), None, [tiny_policy(seed=2)], tiny_policy(seed=3), None, 10
    )
    assert critic == (None, None, None)
    assert len(rewards) == 1
    assert not any(p.requires_grad for p in initial.parameters())
    assert actor_scheduler.optimizer is actor_optimizer
    loader = strategy.setup_dataloader(list(range(10)), batch_size=2, shuffle=False, drop_last=False)
    seen = [int(item) for batch in loader for item in batch]
    assert sorted(item for part in strategy.comm.all_gather_object(seen) for item in part) == list(range(10))
    assert strategy.unwrap_model(actor) is actor.hf


if __name__ == "__main__":
    name, output = sys.argv[1], sys.argv[2]
    strategy = create_strategy(GRPOConfig(strategy=name))
    strategy.setup_distributed()
    for check in (
        check_same_weights_everywhere,
        check_global_norm_clipping_and_skip,
        check_one_reduction_per_update,
        check_state_dict_modes,
        check_offload,
        check_offloaded_gradients,
        check_accumulation_by_calls,
        check_forward_restores_order,
        check_eval_batch,
        check_checkpoint,
        check_contract_helpers,
    ):
        strategy.max_norm = 1.0
        check(strategy)
        if strategy.comm.is_main:
            print("ok", check.__name__, flush=True)
    check_export(strategy, output)
    strategy.close()
    print("all checked", flush=True)
