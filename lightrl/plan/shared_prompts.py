"""Decides whether a planned run computes prompts once (--share_prompts), and what micro-batches then hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from lightrl.config import RolloutConfig, RunConfig
from lightrl.data.packing import Key, split_micro_batches
from lightrl.plan.activations import PackShape, paper_batch, to_half
from lightrl.plan.batches import Batches
from lightrl.plan.models import SCORER, Model, fake, faked
from lightrl.plan.trees import paper_tree, saved_by, scorer_in, share_on_paper
from lightrl.sharing.families import Dealt, cut_to_fit, dealt, evenly_dealt, filled
from lightrl.sharing.model import MOST_COMPUTED, objection_to
from lightrl.sharing.tree import LEAST_SAVED, with_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Whether a run computes prompts once, and why."""

    way: Literal["none", "by itself", "asked for"]
    reason: str  # in words for the user

    def shares(self, model: Model) -> bool:
        """Returns whether a model runs trees; raises ValueError if it is asked to but cannot."""
        refusal = _refusal(model)
        if refusal and self.way == "asked for":
            raise ValueError(f"--share_prompts does not go with {refusal} Leave it out.")
        return not refusal and (self.way == "asked for" or not _copies_keys(model))


@lru_cache(maxsize=16)
def _refusal(model: Model) -> str:
    found = objection_to(scorer_in(model.smaller(model.num_layers)))
    return found and f"model type {model.hf_config.model_type!r}{found}"


@lru_cache(maxsize=16)
def _copies_keys(model: Model) -> bool:
    """Returns whether some layer's kind of attention has no CPU kernel for trees, so that keys are copied."""
    module, tree = model.smaller(model.num_layers), paper_tree((2,), LEAST_SAVED, 1)
    assert tree is not None
    with fake(), torch.no_grad():
        to_half(faked(module))  # the experts of a mixture need it
        sharing = share_on_paper(module, is_copied=False)
        module(with_tree(paper_batch(PackShape(num_sequences=2, length=LEAST_SAVED + 1, num_scored=1)), tree))
    return bool(sharing.copying)


def sharing_of(config: RunConfig, *, is_accelerator: bool) -> Sharing:
    """Returns the effect of --share_prompts on the planned machine."""
    if not isinstance(config, RolloutConfig):
        return Sharing(way="none", reason="")
    if config.share_prompts == "auto" and not is_accelerator and config.may_share_prompts:
        return Sharing(way="by itself", reason="--share_prompts auto is on for a CPU")
    if config.share_prompts == "auto":
        cause = "on a GPU" if is_accelerator else "beside other options of this run"
        return Sharing(way="none", reason=f"--share_prompts auto is off {cause}")
    way: Literal["none", "asked for"] = "asked for" if config.share_prompts else "none"
    return Sharing(way=way, reason=f"--share_prompts {config.share_prompts}")


def with_shared_prompts(
    batches: Batches, config: RunConfig, sharing: Sharing, ranks: int, models: Sequence[Model]
) -> Batches:
    """Returns the batches of a run that shares prompts, assuming that no two prompts begin alike."""
    if not isinstance(config, RolloutConfig) or sharing.way == "none":
        return batches
    whole = [model for model in models if model.role == SCORER or not sharing.shares(model)]
    whole_roles = frozenset(model.role for model in whole)
    shared = _of_families(batches, config, ranks) if sharing.way == "asked for" else _by_itself(batches, config)
    return replace(shared, whole_roles=whole_roles)


def describe_sharing(sharing: Sharing, batches: Batches) -> str:
    """Returns a line that says whether prompts are computed once."""
    if sharing.way == "none":
        return sharing.reason and f"each sample computes its prompt: {sharing.reason}"
    if not batches.pack.families:
        return f"{sharing.reason}, but no micro-batch is sure to have enough samples of a prompt to compute it once"
    pack, whole = batches.pack, ", ".join(sorted(batches.whole_roles))
    text = f"prompts are computed once: {sharing.reason}; the largest micro-batch runs {pack.num_computed} tokens"
    return f"{text} ({whole}: {pack.num_tokens})" if whole else text


def _by_itself(batches: Batches, config: RolloutConfig) -> Batches:
    """Counts what a micro-batch saves at least, whatever the lengths of its samples.

    The lengths decide which samples it holds: in the worst case, as few of each prompt as possible.
    """
    pack, num_prompts = batches.pack, _num_prompts(config)
    least, more = divmod(pack.num_sequences, num_prompts)
    sizes = tuple(size for number in range(num_prompts) if (size := least + (number < more)))
    shared = replace(pack, families=sizes)
    if shared.num_computed > MOST_COMPUTED * shared.num_tokens:
        return batches
    return replace(batches, pack=shared, computed_share=shared.num_computed / shared.num_tokens)


def _num_prompts(config: RolloutConfig) -> int:
    return -(-config.num_prompts // config.num_minibatches)


# ---- Families, as they are packed ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Samples of one prompt, all of the largest length."""

    key: Key
    num_samples: int
    prompt: int  # tokens
    response: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are computed."""
        whole = self.num_samples * (self.prompt + self.response)
        return whole - saved_by(self.num_samples, self.prompt)

    @property
    def label(self) -> str:
        """The subject of an error message about the family."""
        return "A sample that is as long as it can be"

    def halves(self) -> list[_Family]:
        """Splits the family into two."""
        return self.pieces(-(-self.num_samples // 2))

    def pieces(self, max_samples: int) -> list[_Family]:
        """Splits the family into parts of up to max_samples."""
        position, first = self.key
        return [
            replace(self, key=(position, first + start), num_samples=min(max_samples, self.num_samples - start))
            for start in range(0, self.num_samples, max_samples)
        ]


def _of_families(batches: Batches, config: RolloutConfig, ranks: int) -> Batches:
    pack = batches.pack
    prompt = pack.length - pack.num_scored
    whole = [
        _Family(key=(position, 0), num_samples=config.group_size, prompt=prompt, response=pack.num_scored)
        for position in range(_num_prompts(config))
    ]
    of_ranks = _dealt_out(whole, ranks) if ranks > 1 else [whole]
    cut = [_micro_batches(families, config) for families in of_ranks]
    count = max(len(parts) for parts in cut)
    cut = [_micro_batches(families, config, count) if families else [] for families in of_ranks]
    packs = [
        replace(pack, num_sequences=sum(sizes), families=sizes)
        for parts in cut
        for part in parts
        if (sizes := tuple(family.num_samples for family in part))
    ]
    computed, tokens = sum(one.num_computed for one in packs), sum(one.num_tokens for one in packs)
    return replace(
        batches,
        of_rank=max(sum(family.num_samples for family in families) for families in of_ranks),
        micro_batches=count * config.tp_size * config.sp_size,
        pack=max(packs, key=lambda one: (one.num_computed, one.num_sequences)),
        computed_share=computed / tokens,
    )


def _dealt_out(whole: Sequence[_Family], ranks: int) -> list[list[_Family]]:
    """Returns the families of each rank; parts of a family on the same rank are joined again."""
    ordered = [family for rank in range(ranks) for family in whole[rank::ranks]]  # sorted by rank
    owner_of = {family.key[0]: rank for rank in range(ranks) for family in whole[rank::ranks]}

    def deal(parts: list[_Family]) -> Dealt:
        loads: list[list[int]] = [[] for _ in range(ranks)]
        for part in parts:
            loads[owner_of[part.key[0]]].append(part.num_tokens)
        return dealt(loads)

    parts, found = evenly_dealt(ordered, deal, ranks)
    counts: list[Counter[int]] = [Counter() for _ in range(ranks)]
    for part, target in zip(parts, found.targets, strict=True):
        counts[target][part.key[0]] += part.num_samples
    return [[replace(whole[position], num_samples=size) for position, size in count.items()] for count in counts]


def _micro_batches(families: Sequence[_Family], config: RolloutConfig, count: int = 1) -> list[list[_Family]]:
    if config.micro_batch_size:
        return filled(families, config.micro_batch_size)
    limit = max(config.max_tokens_per_microbatch, *(family.prompt + family.response for family in families), 0)
    parts = cut_to_fit(families, limit)
    return split_micro_batches(parts, max_tokens=limit, max_samples=None, min_num=count)
