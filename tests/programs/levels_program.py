"""Learns from the same groups by learn_from() and by its public calls, GRPO and PPO, and compares bit for bit.

usage: levels_program.py KIND FOLDER OUTPUT_FOLDER
"""

import sys

import torch

from lightrl.config import AlgorithmConfig, CriticConfig, EvalConfig, GRPOConfig, PPOAlgorithmConfig, PPOConfig
from lightrl.testing.tiny_training import parameters
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.ppo import PPOTrainer

KL = {"kl_coef": 0.1}
CASES = {
    "grpo": (GRPOTrainer, GRPOConfig, {"algorithm": AlgorithmConfig(loss="kl_cov", **KL)}),
    "ppo": (PPOTrainer, PPOConfig, {"algorithm": PPOAlgorithmConfig(kl_in_reward="k1", **KL), "critic_lr": 1e-2}),
    "ppo, shared": (PPOTrainer, PPOConfig, {"critic": CriticConfig(shared_backbone=True, head_init_std=0.1)}),
}


def models(trainer):
    critic = getattr(trainer, "critic", None)
    return [trainer.policy] if critic is None else [trainer.policy, critic]


def state(trainer):
    return [parameters(trainer.strategy, model) for model in models(trainer)]


def by_calls(trainer, groups):
    if isinstance(trainer, GRPOTrainer):
        batch = trainer.pack(trainer.compute_advantages(groups))
        batch = trainer.compute_old_logprobs(batch)
        batch = trainer.compute_reference_logprobs(batch)
    else:
        batch = trainer.pack(groups)
        batch = trainer.compute_old_logprobs(batch)
        batch = trainer.compute_reference_logprobs(batch)
        batch = trainer.compute_values(batch)
        batch = trainer.compute_advantages(batch)
    trainer.train(batch)


def compare(kind, folder, output, strategy="fsdp"):
    trainer_class, config_class, options = CASES[kind]
    config = config_class(
        model=f"{folder}/model",
        train_data=f"{folder}/train.jsonl",
        reward=(f"{folder}/reward.py:odd_digits",),
        num_prompts=4,
        group_size=3,
        num_minibatches=2,
        num_epochs=2,
        lr=1e-2,
        strategy=strategy,
        eval=EvalConfig(every=0),
        output_dir=str(output),
        **options,
    )
    trainer = trainer_class(config)
    groups = trainer.score(trainer.sample(trainer.prompts.draw(config.num_prompts)))
    trainer.report()
    start = [{name: value.clone() for name, value in model.state_dict().items()} for model in models(trainer)]
    before = state(trainer)
    found = []
    for learn in (trainer.learn_from, lambda groups: by_calls(trainer, groups)):
        for model, saved in zip(models(trainer), start, strict=True):
            model.load_state_dict(saved)
        trainer.optimizer.state.clear()
        if getattr(trainer, "critic_optimizer", None) is not None:
            trainer.critic_optimizer.state.clear()
        learn(groups)
        found.append((state(trainer), trainer.report().metrics))
    (first, metrics), (second, others) = found
    assert metrics == others, {name: (metrics[name], others[name]) for name in metrics if metrics[name] != others[name]}
    for one, other, untrained in zip(first, second, before, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert any(not torch.equal(one[name], untrained[name]) for name in one), "nothing was trained"
    if kind == "grpo":
        batch = trainer.pack(trainer.compute_advantages(groups))
        try:
            trainer.train(batch)
        except ValueError as error:
            assert "compute_old_logprobs" in str(error)
        else:
            raise AssertionError("several updates without the logprobs before them went through")
    trainer.close()


if __name__ == "__main__":
    compare(*sys.argv[1:])
    print("equal")
