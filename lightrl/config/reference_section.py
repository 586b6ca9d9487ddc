"""The options of a reference that follows the policy, and the runs that they do not go with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from lightrl.config.options import check_needed, option, section


@dataclass(kw_only=True, slots=True)
class ReferenceConfig:
    """Whether the reference of the KL penalty or of DPO follows the policy."""

    sync_every: int = option(0, at_least=0)
    """Steps after which the reference takes over weights of the policy. 0: it stays the model that the run starts
    from."""
    mixup: float = option(
        1.0, above=0, at_most=1, check=partial(check_needed, "reference.mixup", "reference.sync_every")
    )
    """Share of the policy in the reference after a sync: mixup * policy + (1 - mixup) * reference. 1: a copy."""


def check_reference(config: Any) -> None:
    """Raises ValueError for a run that has no reference of its own to sync."""
    given = f"--reference.sync_every {config.reference.sync_every}"
    if config.lora.is_on:
        raise ValueError(
            f"{given} does not go with adapters: the reference is then the policy without its adapters and has no "
            "weights of its own. Leave it out, or train the whole model without --lora.*."
        )
    algorithm = getattr(config, "algorithm", None)  # DPO always has a reference
    if algorithm is not None and not algorithm.kl_coef:
        raise ValueError(f"{given} needs a KL coefficient: without --algorithm.kl_coef there is no reference.")
    if config.reference.mixup < 1 and config.strategy == "megatron" and config.dtype == "bfloat16":
        raise ValueError(
            f"--reference.mixup {config.reference.mixup} does not go with --strategy megatron --dtype bfloat16, which "
            "keeps the reference in bfloat16: small steps towards the policy would be rounded away. Use "
            "--reference.mixup 1, or --dtype float32."
        )


@dataclass(kw_only=True)
class ReferenceOptions:
    """Options of a trainer that compares its policy with a reference."""

    __slots__ = ()

    reference: ReferenceConfig = section(ReferenceConfig, check=check_reference)
