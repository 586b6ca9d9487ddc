"""Trains adapters under each of the given strategies, one after the other, and checks them; runs on every rank.

lora_program.py FOLDER "--strategy ddp" "--strategy deepspeed --deepspeed.zero_stage 2" ...
Writes the results to FOLDER/<index>.pt and the export to FOLDER/<index>/.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from lightrl.config import GRPOConfig, LoraConfig, parse_config
from lightrl.models import lora
from lightrl.models.policy import Policy, response_batch
from lightrl.strategy import StrategyBase, create_strategy
from lightrl.strategy.serving.adapter_source import serve_adapters
from lightrl.strategy.torch_native import TorchStrategy
from lightrl.testing.tiny_training import (
    STEPS,
    MakeOptimizer,
    Trained,
    adamw,
    make_batch,
    parameters,
    same,
    sgd,
    tiny_policy,
    train,
    trainable,
)

OPTIONS = LoraConfig(rank=4)
SEED = 7
CASES: dict[str, tuple[MakeOptimizer, float]] = {"adamw": (adamw, 1.0), "sgd": (sgd, 0.0)}  # the clip; 0 for none


def fresh(strategy: StrategyBase, make_optimizer: MakeOptimizer = adamw) -> Policy:
    """Each rank builds from another seed: rank 0's adapters must win, as its weights do."""
    rank = strategy.comm.rank
    policy: Any = tiny_policy(seed=rank, device="cpu" if strategy.materializes_weights else "meta")
    lora.add_adapters(policy.hf, OPTIONS, seed=SEED + rank)
    policy = strategy.prepare_model(policy)
    strategy.register(policy, make_optimizer(trainable(policy)))
    return policy


def trained_by(strategy: StrategyBase, case: str) -> tuple[Policy, Trained]:
    make_optimizer, strategy.max_norm = CASES[case]
    policy = fresh(strategy, make_optimizer)
    results = [train(strategy, policy, step) for step in range(STEPS)]
    losses, norms = [item.loss for item in results], [item.grad_norm for item in results]
    return policy, Trained(losses, norms, parameters(strategy, policy))


def largest_difference(strategy: StrategyBase, policy: Policy) -> float:
    """Of a logprob, engine against trainer."""
    prompts = [[5, 9, 33], [7]]
    items = strategy.gather_and_generate({"max_tokens": 8, "temperature": 0.8}, all_prompt_token_ids=prompts)
    pairs = [(item.prompt_token_ids, item.output_token_ids) for item in items]
    (scores,) = strategy.forward([response_batch(pairs, temperature=0.8).to(strategy.device)], model=policy)
    sampled = torch.tensor([value for item in items for value in item.logprobs])
    return float((scores.logprobs.cpu() - sampled).abs().max())


def check_engine(strategy: TorchStrategy, policy: Policy) -> None:
    """It gets merged weights; the trained ones are as they were."""
    own = {name: strategy.layout.shard(item).clone() for name, item in policy.named_parameters()}
    strategy.setup_inference_engine(None, "native", actor=policy)
    assert largest_difference(strategy, policy) < 1e-5
    same({name: strategy.layout.shard(item) for name, item in policy.named_parameters()}, own)
    before = parameters(strategy, policy)
    train(strategy, policy, STEPS)
    assert largest_difference(strategy, policy) > 1e-4  # the engine has the older weights still
    strategy.update_engine_weights(policy)
    assert largest_difference(strategy, policy) < 1e-5
    moved = [name for name, value in parameters(strategy, policy).items() if not torch.equal(value, before[name])]
    assert moved == sorted(lora.adapters_of(policy.hf))
    assert strategy.engine is not None
    strategy.engine.close()
    strategy.serving.engine = None


def check_unmerged(strategy: TorchStrategy, policy: Policy) -> None:
    """The engine gets the weights once and the adapters at every sync, from whatever shards, and they are proven."""
    source, factories = strategy.serving.source, strategy.serving.factories
    serve_adapters(strategy)
    strategy.setup_inference_engine(None, "native", actor=policy)
    assert largest_difference(strategy, policy) < 1e-5
    train(strategy, policy, STEPS)
    strategy.update_engine_weights(policy)
    assert largest_difference(strategy, policy) < 1e-5
    assert strategy.serving.last_sync is not None
    adapters = sum(4 * OPTIONS.rank * (item.down.shape[1] + item.up.shape[0]) for item in whole_shapes().values())
    assert strategy.serving.last_sync.num_bytes == adapters
    strategy.serving.close()
    strategy.serving.source, strategy.serving.factories = source, factories


def check_reference(strategy: StrategyBase, policy: Policy) -> None:
    """The policy without its adapters scores as a model that never had any, and goes on training as before."""
    batch = make_batch([]) if strategy.comm.rank else response_batch([([5, 9], [33, 2]), ([7], [8, 1, 0])])
    (found,) = strategy.forward([batch.to(strategy.device)], model=lora.WithoutAdapters(policy))
    assert policy.training
    expected = tiny_policy()(batch).logprobs.detach()
    torch.testing.assert_close(found.logprobs.cpu(), expected, atol=1e-6, rtol=0)
    (adapted,) = strategy.forward([batch.to(strategy.device)], model=policy)
    assert strategy.comm.rank or (adapted.logprobs.cpu() - expected).abs().max() > 1e-4
    assert train(strategy, policy, 0).grad_norm > 0


def check_resume(strategy: StrategyBase, policy: Policy, folder: Path) -> None:
    """A checkpoint holds adapters alone, and two steps after it are those of the run that went on."""
    strategy.save_ckpt(policy, str(folder))
    saved = sum(path.stat().st_size for path in folder.glob("step-*/model-rank*.safetensors"))
    size = 4 * sum(adapter.down.shape[1] + adapter.up.shape[0] for adapter in whole_shapes().values()) * OPTIONS.rank
    assert size < saved < size + 8000 * strategy.comm.world, (saved, size)
    wanted = [train(strategy, policy, step) for step in (1, 2)]
    again = fresh(strategy)
    strategy.load_ckpt(again, str(folder))
    found = [train(strategy, again, step) for step in (1, 2)]
    assert found == wanted
    same(parameters(strategy, again), parameters(strategy, policy))


def whole_shapes() -> dict[str, lora.Adapter]:
    policy = tiny_policy(device="meta")
    lora.add_adapters(policy.hf, OPTIONS, seed=SEED)
    return lora.adapters_of(policy.hf)


def run(strategy: TorchStrategy, folder: Path) -> None:
    found = {case: trained_by(strategy, case)[1] for case in list(CASES)[1:]}
    policy, found["adamw"] = trained_by(strategy, "adamw")
    check_engine(strategy, policy)
    check_unmerged(strategy, policy)
    check_reference(strategy, policy)
    check_resume(strategy, policy, folder / "checkpoints")
    strategy.save_pretrained(policy, folder)
    final = parameters(strategy, policy)
    if strategy.comm.is_main:
        torch.save({"final": final, **{case: item._asdict() for case, item in found.items()}}, folder / "found.pt")


def main() -> None:
    root, *commands = sys.argv[1:]
    for index, command in enumerate(commands):
        strategy = create_strategy(parse_config(GRPOConfig, shlex.split(command)))
        strategy.setup_distributed()
        folder = Path(root) / str(index)
        if strategy.comm.is_main:
            folder.mkdir()
        assert isinstance(strategy, TorchStrategy)
        run(strategy, folder)
    strategy.close()


if __name__ == "__main__":
    main()
