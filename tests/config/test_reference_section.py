from typing import Any

import pytest

from lightrl.config import AlgorithmConfig, DPOConfig, GRPOConfig, LoraConfig, PPOAlgorithmConfig, PPOConfig
from lightrl.config.reference_section import ReferenceConfig

SYNCED = ReferenceConfig(sync_every=3)
MIXED = ReferenceConfig(sync_every=1, mixup=0.5)


@pytest.mark.parametrize("kind", [GRPOConfig, PPOConfig])
def test_a_reference_that_nothing_loads_cannot_follow(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"--reference.sync_every 3 needs a KL coefficient: without --algorithm.kl_"):
        kind(reference=SYNCED)


def test_runs_with_a_reference_take_it() -> None:
    GRPOConfig(reference=MIXED, algorithm=AlgorithmConfig(kl_coef=0.1))
    PPOConfig(reference=SYNCED, algorithm=PPOAlgorithmConfig(kl_coef=0.1, kl_in_reward="k1"))
    DPOConfig(reference=SYNCED)


@pytest.mark.parametrize("lora", [LoraConfig(rank=2), LoraConfig(path="adapter")])
def test_a_policy_without_its_adapters_has_no_weights_of_its_own(lora: LoraConfig) -> None:
    with pytest.raises(ValueError, match=r"--reference.sync_every 3 does not go with adapters: the reference is then"):
        DPOConfig(reference=SYNCED, lora=lora)


def test_a_rounded_reference_takes_copies_alone() -> None:
    rounded: dict[str, Any] = {"strategy": "megatron", "dtype": "bfloat16"}
    algorithm = AlgorithmConfig(kl_coef=0.1)
    with pytest.raises(ValueError, match=r"--reference.mixup 0.5 does not go with --strategy megatron --dtype bfloat"):
        GRPOConfig(**rounded, algorithm=algorithm, reference=MIXED)
    GRPOConfig(**rounded, algorithm=algorithm, reference=SYNCED)
    GRPOConfig(strategy="megatron", algorithm=algorithm, reference=MIXED)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mixup": 0.5}, "--reference.mixup does nothing without --reference.sync_every"),
        ({"sync_every": 1, "mixup": 0.0}, "--reference.mixup is 0.0: it must be above 0 and at most 1"),
        ({"sync_every": 1, "mixup": 1.5}, "--reference.mixup is 1.5: it must be above 0 and at most 1"),
        ({"sync_every": -1}, "--reference.sync_every is -1: it must be 0 or above"),
    ],
)
def test_shares_and_steps_are_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DPOConfig(reference=ReferenceConfig(**options))
