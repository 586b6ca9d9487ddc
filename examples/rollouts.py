"""GRPO with AReaL's calls, without a trainer: torchrun --nproc_per_node 2 examples/rollouts.py"""

import argparse

import torch

from lightrl import Episode, GRPOConfig, Workflow, create_strategy
from lightrl.algorithms.advantages import ScoredSamples, grpo
from lightrl.builtin.model import builtin_model_path
from lightrl.data.prompts import load_records
from lightrl.models.policy import load_policy, load_tokenizer
from lightrl.rollout.rollouts import Rollouts
from lightrl.strategy.user_batch import gather_logprobs, next_token


class Add(Workflow):
    async def arun_episode(self, engine, data):
        episode = Episode(data.token_ids)
        episode.say(turn := await engine.generate(episode.ids))
        episode.reward = float(turn.text.strip() == str(data.answer))
        return episode


def loss(logits, data):
    mask = next_token(data, "loss_mask").bool()
    logprobs = gather_logprobs(logits, next_token(data, "input_ids"))
    ratio = (logprobs - next_token(data, "logprobs")).exp()  # to the weights that sampled
    advantages = data["advantages"].repeat_interleave(data["cu_seqlens"].diff().long()).to(ratio.dtype)
    terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return torch.where(mask, terms, 0.0).sum() / mask.count_nonzero()


def main(num_steps, config):
    strategy = create_strategy(config)
    strategy.setup_distributed()
    strategy.tokenizer = load_tokenizer(path := str(builtin_model_path()))
    policy = strategy.prepare_trained(load_policy(path, materialize=strategy.materializes_weights)).model
    strategy.setup_inference_engine(config, config.engine, actor=policy)
    sizes = {"batch_size": config.num_prompts, "group_size": config.group_size, "max_new_tokens": 8}
    rollouts = Rollouts(strategy, Add(), **sizes, max_staleness=1, seed=config.seed)
    records = [record for record, _ in load_records(config.train_data)]

    for step in range(num_steps):
        batch = rollouts.prepare_batch(records)
        rewards, groups = batch["rewards"], batch["group_ids"]
        batch["advantages"] = grpo(ScoredSamples(rewards=rewards, group_ids=groups)) if len(rewards) else rewards
        strategy.train_batch(batch, loss, lambda data: data["loss_mask"].count_nonzero())
        strategy.set_global_step(step + 1)
        strategy.sync_weights(policy)
        mean = strategy.all_reduce(float(rewards.sum()), "sum") / (config.num_prompts * config.group_size)
        strategy.print(f"step {step + 1} reward {mean:.9g}")
    rollouts.close()
    strategy.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int, nargs="?", default=40)
    main(parser.parse_args().steps, GRPOConfig())
