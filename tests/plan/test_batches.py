"""The arithmetic of batches and work."""

import copy
from dataclasses import replace
from typing import Any

import pytest

from lightrl.config import (
    AlgorithmConfig,
    CriticConfig,
    DPOConfig,
    GRPOConfig,
    PPOAlgorithmConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    WorkflowConfig,
)
from lightrl.plan.batches import batches_of, flops_of_step, kv_bytes_of_token, passes_of
from lightrl.plan.models import policy_of


def test_sequences_are_dealt_to_ranks_and_micro_batches() -> None:
    config = GRPOConfig(num_prompts=8, group_size=4, max_new_tokens=64, max_tokens_per_microbatch=512)
    batches = batches_of(config, ranks=2, prompt_tokens=6, response_tokens=0)
    # 32 sequences of 70 tokens, 16 on a rank; 7 fit into 512 tokens, so 3 micro-batches of at most 6.
    assert (batches.sequences, batches.of_rank, batches.micro_batches) == (32, 16, 3)
    assert (batches.pack.num_sequences, batches.pack.num_tokens, batches.pack.num_scored) == (6, 420, 64)
    assert "16 sequences an update in 3 micro-batch(es)" in batches.describe()
    assert batches_of(config, ranks=3, prompt_tokens=6, response_tokens=0).of_rank == 11  # on the fullest rank


def test_a_reward_model_scores_one_token_of_a_sequence() -> None:
    config = RMConfig(batch_size=8, max_tokens_per_microbatch=50)
    pack = batches_of(config, ranks=1, prompt_tokens=4, response_tokens=8).pack
    assert (pack.num_sequences, pack.length, pack.num_scored) == (4, 12, 1)


def test_prompts_that_a_run_shares_by_itself_leave_its_micro_batches_as_they_are() -> None:
    sizes = {"ranks": 2, "prompt_tokens": 200, "response_tokens": 0}
    planned = [batches_of(GRPOConfig(share_prompts=shares), **sizes) for shares in ("auto", False)]
    assert planned[0] == planned[1]


def test_pairs_stay_together() -> None:
    batches = batches_of(
        DPOConfig(batch_size=8, max_tokens_per_microbatch=50), ranks=1, prompt_tokens=4, response_tokens=8
    )
    assert (batches.of_rank, batches.micro_batches, batches.pack.num_sequences) == (16, 4, 4)  # 2 pairs of 24 tokens


@pytest.mark.parametrize(
    ("config", "trained", "scored"),
    [
        (GRPOConfig(), 1, 1),
        (GRPOConfig(num_minibatches=2, num_epochs=3), 3, 2),
        (GRPOConfig(algorithm=AlgorithmConfig(entropy_fraction=0.2)), 1, 2),  # tokens are chosen by their entropy
        (GRPOConfig(algorithm=AlgorithmConfig(loss="kl_cov")), 1, 2),  # or by the loss
        (GRPOConfig(rollout=WorkflowConfig(over_issue=0.5, max_staleness=1)), 1, 2),  # samples of older weights
        (PPOConfig(algorithm=PPOAlgorithmConfig(kl_coef=0.1, kl_in_reward="k1")), 1, 3),  # the reference, and the KL
        (PPOConfig(), 1, 1),  # and those of the critic
        (PPOConfig(num_epochs=2), 2, 2),
        (PPOConfig(critic=CriticConfig(shared_backbone=True)), 1, 2),
        (PPOConfig(critic=CriticConfig(shared_backbone=True), num_epochs=2), 2, 2),  # one pass scores and values
        (SFTConfig(), 1, 0),
        (DPOConfig(), 1, 1),
    ],
)
def test_passes_of_a_step(config: Any, trained: int, scored: int) -> None:
    passes = passes_of(config)
    assert (passes.trained, passes.scored) == (trained, scored)


def test_work_and_cache(small_config: Any) -> None:
    config = SFTConfig(batch_size=2)
    batches = batches_of(config, ranks=1, prompt_tokens=6, response_tokens=4)
    model = policy_of(small_config, config)
    weights = sum(item.numel for item in model.weights) - 64 * 32  # a row of the embedding is only looked up
    # 20 tokens; forward 2 x weights, attention 2 x 3 layers x 4 heads x 8 wide x 10 long; the backward is twice that.
    wanted = 3 * 20 * (2 * weights + 2 * 3 * 4 * 8 * 10)
    assert flops_of_step(config, model, batches, passes_of(config)) == wanted
    tied = copy.deepcopy(small_config)
    tied.tie_word_embeddings = True  # one matrix less, but the same products
    assert flops_of_step(config, policy_of(tied, config), batches, passes_of(config)) == wanted
    other = replace(policy_of(tied, config), role="reward model")  # reads all, only forwards
    assert flops_of_step(config, model, batches, passes_of(config), [other]) == wanted * 4 / 3
    for whole, share in ((frozenset[str](), 0.5), (frozenset({"reward model"}), 1.0)):
        shared = replace(batches, computed_share=0.5, whole_roles=whole)
        found = flops_of_step(config, model, shared, passes_of(config), [other])
        assert found == wanted / 2 + wanted / 3 * share
    assert kv_bytes_of_token(small_config, 2) == 2 * 3 * 2 * 8 * 2
