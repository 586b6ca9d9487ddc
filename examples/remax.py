"""ReMax over a dictionary of tensors: python examples/remax.py, or torchrun --nproc_per_node 2 examples/remax.py

REINFORCE with the reward of the likeliest response as the baseline (arXiv:2310.10505), in the style of other trainers:
a rollout returns padded tensors by name, and the loss function takes logits and the same tensors, packed. The model and
its task, adding small numbers, are built in.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightrl import GRPOConfig, SamplingParams, StrategyBase, create_strategy
from lightrl.builtin.model import builtin_model_path
from lightrl.data.prompts import build_prompts, load_records
from lightrl.data.sampler import PromptSampler
from lightrl.engines.base import Completion, EnginePrompt
from lightrl.models.policy import load_policy, load_tokenizer
from lightrl.records import Prompt
from lightrl.seeding import mix_seed
from lightrl.strategy.user_batch import gather_logprobs, next_token


def reinforce_loss(logits: Any, data: Mapping[str, Tensor]) -> Tensor:
    """The mean of -logprob x reward over the response tokens. Row p of the logits predicts token p + 1."""
    mask = next_token(data, "loss_mask").bool()
    logprobs = gather_logprobs(logits, next_token(data, "input_ids"))
    rewards = data["rewards"].repeat_interleave(data["cu_seqlens"].diff().long())  # one per sequence
    return torch.where(mask, -logprobs * rewards, 0.0).sum() / mask.count_nonzero()


class ReinforceActor:
    """The algorithm, which runs on any strategy."""

    def __init__(self, strategy: StrategyBase) -> None:
        self.strategy = strategy

    def train_reinforce(self, data: Mapping[str, Tensor]) -> Any:
        """Takes one step; the strategy takes care of micro-batches, packing and the mean over all ranks."""
        return self.strategy.train_batch(
            data, loss_fn=reinforce_loss, loss_weight_fn=lambda x: x["loss_mask"].count_nonzero()
        )


class ReMaxRollout:
    """Samples responses, and generates the likeliest one of each prompt, whose reward is subtracted."""

    def __init__(self, strategy: StrategyBase, config: GRPOConfig) -> None:
        self.strategy, self.config = strategy, config

    def batch(self, prompts: list[tuple[int, Prompt]], step: int) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the tensors of this rank's samples, and their rewards before the baseline."""
        engine_prompts = [EnginePrompt(token_ids=prompt.token_ids) for _, prompt in prompts]
        length, count = self.config.max_new_tokens, self.config.group_size
        seeds = [mix_seed(1, self.config.seed, step, position) for position, _ in prompts]
        sampling = [SamplingParams(max_new_tokens=length, n=count, seed=seed) for seed in seeds]
        greedy = [SamplingParams(max_new_tokens=length, temperature=0.0)] * len(prompts)
        samples = self.strategy.generate(engine_prompts, sampling, sleep_engine=False)
        likeliest = self.strategy.generate(engine_prompts, greedy)
        baselines = [self.reward(prompt, item) for (_, prompt), item in zip(prompts, likeliest, strict=True)]
        owners = [owner for owner in range(len(prompts)) for _ in range(count)]  # n samples a prompt, in order
        gained = [self.reward(prompts[owner][1], item) for owner, item in zip(owners, samples, strict=True)]
        rows = [
            (prompts[owner][1].token_ids, item.output_token_ids, reward - baselines[owner])
            for owner, item, reward in zip(owners, samples, gained, strict=True)
        ]
        return padded(rows), torch.tensor(gained)

    def reward(self, prompt: Prompt, completion: Completion) -> float:
        assert self.strategy.tokenizer is not None
        text = self.strategy.tokenizer.decode(list(completion.output_token_ids), skip_special_tokens=True)
        return float(text.strip() == str(prompt.answer))


def padded(rows: list[tuple[tuple[int, ...], tuple[int, ...], float]]) -> dict[str, Tensor]:
    """Returns each prompt with its response in one row, padded with zeros at the end."""
    width = max((len(prompt) + len(response) for prompt, response, _ in rows), default=1)
    tensors = {name: torch.zeros(len(rows), width, dtype=torch.int64) for name in ("input_ids", "loss_mask")}
    tensors["attention_mask"] = torch.zeros(len(rows), width, dtype=torch.bool)
    for row, (prompt, response, _) in enumerate(rows):
        end = len(prompt) + len(response)
        tensors["input_ids"][row, :end] = torch.tensor(prompt + response)
        tensors["loss_mask"][row, len(prompt) : end] = 1
        tensors["attention_mask"][row, :end] = True
    return {**tensors, "rewards": torch.tensor([reward for _, _, reward in rows])}


def main(config: GRPOConfig) -> None:
    strategy = create_strategy(config)
    strategy.setup_distributed()
    comm = strategy.comm
    path = str(builtin_model_path())
    strategy.tokenizer = load_tokenizer(path)
    policy = strategy.prepare_trained(load_policy(path, materialize=strategy.materializes_weights)).model
    strategy.setup_inference_engine(config, config.engine, actor=policy)
    strategy.sleep_engine()
    prompts = build_prompts(load_records(config.train_data), strategy.tokenizer, max_prompt_tokens=64)
    sampler = PromptSampler(len(prompts), config.num_prompts, config.seed)
    actor, rollout = ReinforceActor(strategy), ReMaxRollout(strategy, config)

    for step in range(config.max_steps):
        started = time.perf_counter()
        mine = [(position, prompts[index]) for position, index in enumerate(sampler.next_batch())]
        batch, rewards = rollout.batch(mine[comm.rank :: comm.world], step)
        result = actor.train_reinforce(batch)
        strategy.set_global_step(step + 1)
        strategy.sync_weights(policy)
        mean = comm.all_reduce(float(rewards.sum()), "sum") / (config.num_prompts * config.group_size)
        strategy.print(
            f"step {step + 1} reward {mean:.9g} loss {result.loss:.9g} grad_norm {result.grad_norm:.9g} "
            f"seconds {time.perf_counter() - started:.2f}"
        )
    strategy.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"max_steps": 40, "num_prompts": 32, "group_size": 8, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    try:
        config = GRPOConfig(**vars(parser.parse_args()))
    except ValueError as error:  # a number out of its range
        parser.error(str(error))
    main(config)
