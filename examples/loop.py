"""GRPO as one loop: python examples/loop.py, or torchrun --nproc_per_node 2 examples/loop.py

The code follows the order of the data: prompts, samples, rewards, advantages, micro-batches, update, weight sync. The
model and its task, adding small numbers, are built in. The first step gives the same numbers as scripts/train_grpo.py.
"""

from __future__ import annotations

import argparse

import torch

from lightrl import Experience, GRPOConfig, Sample, SamplingParams, create_strategy
from lightrl.algorithms.advantages import ScoredSamples, grpo
from lightrl.algorithms.losses import PolicyTokens, TokenWeights, mean_loss, ppo_clip, token_mean
from lightrl.builtin.model import builtin_model_path
from lightrl.data.packing import dummy_batch, pack, split_micro_batches
from lightrl.data.prompts import build_prompts, load_records
from lightrl.data.sampler import PromptSampler
from lightrl.engines.base import EnginePrompt
from lightrl.models.policy import load_policy, load_tokenizer
from lightrl.records import PackedBatch, TokenScores
from lightrl.rewards.text_match import exact_match
from lightrl.seeding import mix_seed


def main(config: GRPOConfig) -> None:
    # Ranks, model, optimizer. Every rank runs this program; the strategy decides where the weights are.
    strategy = create_strategy(config)
    strategy.setup_distributed()
    rank, world, size = strategy.comm.rank, strategy.comm.world, config.group_size
    path = str(builtin_model_path())
    strategy.tokenizer = load_tokenizer(path)
    model = load_policy(path, materialize=strategy.materializes_weights)
    policy = strategy.prepare_trained(model).model

    # The engine gets the policy's weights, and sleeps while the policy learns.
    strategy.setup_inference_engine(config, config.engine, actor=policy)
    strategy.sleep_engine()

    prompts = build_prompts(load_records(config.train_data), strategy.tokenizer, max_prompt_tokens=64)
    sampler = PromptSampler(len(prompts), config.num_prompts, config.seed)

    for step in range(config.max_steps):
        # Prompts: the batch of the step is the same for any number of ranks; each rank takes its part of it.
        batch = [(position, prompts[index]) for position, index in enumerate(sampler.next_batch())][rank::world]

        # Samples: a group for each prompt. A draw depends on seed, step and position (1 is for rollouts), not on ranks.
        seeds = [mix_seed(1, config.seed, step, position) for position, _ in batch]
        params = [SamplingParams(max_new_tokens=config.max_new_tokens, n=size, seed=seed) for seed in seeds]
        completions = strategy.generate([EnginePrompt(token_ids=prompt.token_ids) for _, prompt in batch], params)
        owners = [owner for owner in batch for _ in range(size)]
        samples = [
            Sample(
                prompt=prompt,
                position=position,
                sample_index=completion.sample_index,
                response_ids=completion.output_token_ids,
                sampler_logprobs=completion.logprobs,
                versions=completion.versions,
                finish_reason=completion.finish_reason,
                text=strategy.tokenizer.decode(list(completion.output_token_ids), skip_special_tokens=True),
            )
            for (position, prompt), completion in zip(owners, completions, strict=True)
        ]

        # Rewards, and advantages: each reward is compared with those of its group, all of which are on this rank.
        rewards = torch.tensor([exact_match(sample) for sample in samples], dtype=torch.float64)
        positions = torch.tensor([sample.position for sample in samples], dtype=torch.int64)
        advantages = grpo(ScoredSamples(rewards=rewards, group_ids=positions)).tolist() if samples else []

        # Micro-batches: samples laid end to end, without padding.
        experience = [
            Experience(sample=sample, reward=reward, advantage=advantage)
            for sample, reward, advantage in zip(samples, rewards.tolist(), advantages, strict=True)
        ]
        parts = split_micro_batches(experience, max_tokens=config.max_tokens_per_microbatch, max_samples=None)
        batches = [pack(part, temperature=1.0) if part else dummy_batch(temperature=1.0) for part in parts]

        # One update, by the mean over all trained tokens of all ranks.
        batches = [batch.to(strategy.device) for batch in batches]
        result = strategy.train_batch(batches, loss, lambda batch: weights(batch).total, model=policy)

        # The engine gets the new weights, under the number of finished steps.
        strategy.set_global_step(step + 1)
        strategy.sync_weights(policy)

        mean = strategy.all_reduce(float(rewards.sum()), "sum") / (config.num_prompts * size)
        strategy.print(f"step {step + 1} reward {mean:.9g} loss {result.loss:.9g} grad_norm {result.grad_norm:.9g}")
    strategy.close()


def loss(scores: TokenScores, batch: PackedBatch) -> torch.Tensor:
    """PPO's clipped loss. With a single update per step, the old logprobs are the policy's own, so the ratio is 1."""
    tokens = PolicyTokens(
        logprobs=scores.logprobs,
        old_logprobs=scores.logprobs.detach(),
        advantages=batch.advantages,
        mask=batch.loss_mask,
        sequence_index=batch.sequence_index,
        num_sequences=len(batch.keys),
    )
    return mean_loss(ppo_clip(tokens).terms, weights(batch))


def weights(batch: PackedBatch) -> TokenWeights:
    """Gives every trained token the same weight."""
    return token_mean(batch.loss_mask, batch.sequence_index, len(batch.keys))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"max_steps": 30, "num_prompts": 16, "group_size": 16, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    try:
        config = GRPOConfig(**vars(parser.parse_args()))
    except ValueError as error:  # a number out of its range
        parser.error(str(error))
    main(config)
