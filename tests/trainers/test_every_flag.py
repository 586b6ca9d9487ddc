"""No flag is without effect: each changes the losses or gradients of the same samples.

The cases are checked against the registry and the config: what is added there must be added here.
"""

import dataclasses
import math
import pkgutil
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
import torch

from lightrl.algorithms import registry
from lightrl.config import AlgorithmConfig, DistillationConfig, GRPOConfig, OverlongConfig
from lightrl.models.policy import load_policy
from lightrl.records import ScoredGroup
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.objective import PolicyObjective
from lightrl.trainers.token_selection import TokenSelector

Fingerprint = tuple[float, ...]
Take = Callable[..., Fingerprint]

# (kind, name, parameter): a value that matters, and the other parameters that it needs.
PARAMETERS: dict[tuple[str, str, str], tuple[str, ...]] = {
    ("advantage", "grpo", "normalize_std"): ("false",),
    ("advantage", "grpo", "eps"): ("0.5",),
    ("advantage", "gpg", "norm"): ("2",),
    ("advantage", "cpgd", "weight"): ("equal",),
    ("advantage", "cpgd", "max_weight"): ("1.1", "weight=signal"),
    ("advantage", "cpgd", "eps"): ("0.5",),
    ("advantage", "gdpo", "eps"): ("0.5",),
    ("advantage", "pass_at_k", "k"): ("2",),
    ("advantage", "pass_at_k", "correct_above"): ("0.3",),
    ("loss", "ppo_clip", "clip_low"): ("0.001",),
    ("loss", "ppo_clip", "clip_high"): ("0.001",),
    ("loss", "ppo_clip", "dual_clip"): ("1.21",),
    ("loss", "cispo", "clip_low"): ("0.001",),
    ("loss", "cispo", "clip_high"): ("0.001",),
    ("loss", "sapo", "tau_pos"): ("3",),
    ("loss", "sapo", "tau_neg"): ("3",),
    ("loss", "cpgd", "clip_low"): ("0.001",),
    ("loss", "cpgd", "clip_high"): ("0.001",),
    ("loss", "cpgd", "drift_coef"): ("1",),
    ("loss", "cpgd", "drift_clip"): ("0.01",),
    ("loss", "gspo", "clip_low"): ("0.3",),
    ("loss", "gspo", "clip_high"): ("0.3",),
    ("loss", "gspo_token", "clip_low"): ("0.3",),
    ("loss", "gspo_token", "clip_high"): ("0.3",),
    ("loss", "gmpo", "clip_low"): ("0.001",),
    ("loss", "gmpo", "clip_high"): ("0.001",),
    ("loss", "vespo", "k_pos"): ("9",),
    ("loss", "vespo", "lambda_pos"): ("9",),
    ("loss", "vespo", "k_neg"): ("9",),
    ("loss", "vespo", "lambda_neg"): ("9",),
    ("loss", "clip_cov", "clip_low"): ("0.001",),
    ("loss", "clip_cov", "clip_high"): ("0.001",),
    ("loss", "kl_cov", "kl_coef"): ("9",),
    ("loss", "dppo_tv", "limit_low"): ("0.0001",),
    ("loss", "dppo_tv", "limit_high"): ("0.0001",),
    ("loss", "dppo_tv", "ratio_cap"): ("0.9",),
    ("loss", "dppo_kl", "limit_low"): ("0.000001",),
    ("loss", "dppo_kl", "limit_high"): ("0.000001",),
    ("loss", "dppo_kl", "ratio_cap"): ("0.9",),
    ("aggregation", "sequence_mean_token_sum_norm", "length"): ("4",),
    ("correction", "tis", "level"): ("sequence",),
    ("correction", "tis", "cap"): ("1.1",),
    ("correction", "mis", "level"): ("sequence",),
    ("correction", "mis", "low"): ("0.9",),
    ("correction", "mis", "high"): ("1.1",),
    ("correction", "icepop", "low"): ("0.9",),
    ("correction", "icepop", "high"): ("1.1",),
    ("correction", "reject", "level"): ("token",),
    ("correction", "reject", "low"): ("0.95",),
    ("correction", "reject", "high"): ("1.05",),
}
REQUIRED = {"sequence_mean_token_sum_norm": ("length=8",)}
DISTINCT = {  # what a name needs to be unlike another
    ("advantage", "cpgd"): ("weight=signal", "max_weight=1.1"),  # by default it is grpo
    ("loss", "dppo_tv"): ("limit_low=0.0001",),  # where no limit is reached, both are cispo
    ("loss", "dppo_kl"): ("limit_low=0.000001",),
}
SAME_HERE = {"gspo_token"}  # as gspo while all tokens of a response have one advantage

# Every other option: what it is changed to, and the options that both sides need.
_TEACHER = {"teacher_model": "teacher"}
_COV = ("fraction=0.2", "low=0.01")
OPTIONS: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"algorithm.clip_low": 0.001}, {}),
    ({"algorithm.clip_high": 0.001}, {}),
    ({"algorithm.kl_coef": 0.1}, {}),
    ({"algorithm.kl_estimator": "k1"}, {"algorithm.kl_coef": 0.1, "algorithm.kl_gradient": "kl"}),
    ({"algorithm.kl_estimator": "k2"}, {"algorithm.kl_coef": 0.1}),
    ({"algorithm.kl_estimator": "own_kl:absolute"}, {"algorithm.kl_coef": 0.1}),
    (
        {"algorithm.kl_estimator_args": ("scale=2",)},
        {"algorithm.kl_coef": 0.1, "algorithm.kl_estimator": "own_kl:absolute"},
    ),
    ({"algorithm.kl_gradient": "kl"}, {"algorithm.kl_coef": 0.1}),
    ({"algorithm.kl_weighted": True}, {"algorithm.kl_coef": 0.1}),
    ({"algorithm.kl_target": 0.001, "algorithm.kl_horizon": 24}, {"algorithm.kl_coef": 0.5}),
    ({"algorithm.kl_horizon": 24}, {"algorithm.kl_coef": 0.5, "algorithm.kl_target": 0.001}),
    ({"algorithm.entropy_coef": 0.1}, {}),
    ({"algorithm.entropy_target": 9.0}, {"algorithm.entropy_coef": 0.1}),
    ({"algorithm.entropy_step": 0.1}, {"algorithm.entropy_coef": 0.1, "algorithm.entropy_target": 9.0}),
    ({"algorithm.off_policy_mask": 0.0001}, {}),
    ({"algorithm.old_logprobs": "engine"}, {}),
    ({"algorithm.proximal": "recompute"}, {}),
    ({"algorithm.proximal": "interpolate"}, {"algorithm.proximal": "recompute"}),
    ({"algorithm.proximal": "sampler"}, {}),
    ({"algorithm.entropy_fraction": 0.5}, {}),
    ({"algorithm.loss": "gspo_token"}, {"algorithm.loss": "gspo", **_TEACHER}),
    ({"algorithm.selection_args": ("fraction=0.3",)}, {"algorithm.loss": "kl_cov"}),
    ({"algorithm.selection_args": ("fraction=0.5", "low=0.01")}, {"algorithm.loss": "clip_cov"}),
    *(
        (
            {"algorithm.selection_args": (_COV[0], bound)},
            {"algorithm.loss": "clip_cov", "algorithm.selection_args": _COV},
        )
        for bound in ("low=0.5", "high=0.02")
    ),
    ({"overlong.buffer": 8}, {}),
    ({"overlong.penalty": 2.0}, {"overlong.buffer": 8}),
    ({"overlong.mask_truncated": True}, {}),
    (_TEACHER, {}),
    ({"distillation.kind": "loss"}, _TEACHER),
    ({"distillation.coef": 2.0}, _TEACHER),
    ({"distillation.reward_weight": 0.0}, _TEACHER),
]


def configured(base: GRPOConfig, options: dict[str, object]) -> GRPOConfig:
    changes: dict[str, object] = {}
    for name, value in options.items():
        section, _, field = name.rpartition(".")
        if section:
            value = dataclasses.replace(changes.get(section, getattr(base, section)), **{field: value})  # type: ignore[type-var]
        changes[section or field] = value
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def take(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Take]:
    """From options to the loss and gradient norm of each of two steps' four updates, always from the same samples."""
    base = GRPOConfig(
        model=str(toy / "model"),
        train_data=str(toy / "train.jsonl"),
        reward=f"{toy / 'reward.py'}:odd_digits",
        num_prompts=4,
        group_size=6,
        num_epochs=2,
        lr=3e-3,
        strategy="single",
        output_dir=str(tmp_path_factory.mktemp("flags") / "run"),
    )
    trainer = GRPOTrainer(base)
    groups = [noisy(group) for group in trainer.score(trainer.sample(list(enumerate(trainer.prompts.train[:4]))))]
    groups[0] = dataclasses.replace(groups[0], rewards=(0.25,) * 6)  # without signal
    other = load_policy(base.model, materialize=True, is_reference=True)
    with torch.no_grad():
        for place, parameter in enumerate(other.parameters()):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place))
    weights = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    updates: list[float] = []
    train_batch = trainer.strategy.train_batch

    def recorded(*args: object, **named: object) -> object:
        result = train_batch(*args, **named)  # type: ignore[arg-type]
        updates.extend([result.loss, result.grad_norm])
        return result

    trainer.strategy.train_batch = recorded  # type: ignore[method-assign, assignment]

    def run(**options: object) -> Fingerprint:
        config = trainer.config = configured(base, options)
        teaching = config.distillation if config.teacher_model else None
        trainer.objective = PolicyObjective(config.algorithm, distillation=teaching, has_selector=True)
        trainer.selector = TokenSelector(config.algorithm) if trainer.objective.needs_selection else None
        trainer.reference = other if config.algorithm.kl_coef else None
        trainer.teacher = other if teaching is not None else None
        trainer.policy.load_state_dict(weights)
        trainer.optimizer.state.clear()
        updates.clear()
        for _ in range(2):
            trainer.learn_from(groups)
            trainer.report()  # moves the coefficients that follow a target
        return tuple(updates)

    yield run
    trainer.close()


def noisy(group: ScoredGroup) -> ScoredGroup:
    """As an engine that rounds, and differs by response, would report it: without that nothing is to be corrected."""
    draw = torch.Generator().manual_seed(group.samples[0].position)
    samples = []
    for sample, reward in zip(group.samples, group.rewards, strict=True):
        offset, *errors = (0.5 * torch.randn(1 + len(sample.sampler_logprobs), generator=draw)).tolist()
        logprobs = tuple(value + offset + error for value, error in zip(sample.sampler_logprobs, errors, strict=True))
        components = {"right": (1.0, reward), "drawn": (0.5, offset)}
        samples.append(dataclasses.replace(sample, sampler_logprobs=logprobs, components=components))
    return dataclasses.replace(group, samples=tuple(samples), baseline=0.3)


def differ(first: Fingerprint, second: Fingerprint) -> bool:
    assert len(first) == len(second) == 8
    assert all(map(math.isfinite, (*first, *second)))
    return any(not math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6) for a, b in zip(first, second, strict=True))


def chosen(kind: str, name: str, args: tuple[str, ...] = ()) -> dict[str, object]:
    """The flags that choose a name, with what it cannot do without."""
    given = {item.partition("=")[0] for item in args}
    required = tuple(item for item in REQUIRED.get(name, ()) if item.partition("=")[0] not in given)
    flags: dict[str, object] = {f"algorithm.{kind}": name, f"algorithm.{kind}_args": (*required, *args)}
    if name == "clip_cov":
        flags["algorithm.selection_args"] = _COV
    return flags


def test_the_same_options_give_the_same_numbers(take: Take) -> None:
    assert take() == take()


@pytest.mark.parametrize("kind", ["advantage", "loss", "aggregation", "correction"])
def test_every_name_differs_from_every_other(kind: str, take: Take) -> None:
    names = sorted(set(registry.BUILTIN[kind]) - SAME_HERE)  # type: ignore[index]
    found = {name: take(**chosen(kind, name, DISTINCT.get((kind, name), ()))) for name in names}
    if kind == "correction":
        found["none"] = take()
    assert [pair for pair in combinations(found, 2) if not differ(found[pair[0]], found[pair[1]])] == []


@pytest.mark.parametrize(("case", "values"), PARAMETERS.items(), ids=[" ".join(case) for case in PARAMETERS])
def test_every_parameter_matters(case: tuple[str, str, str], values: tuple[str, ...], take: Take) -> None:
    kind, name, parameter = case
    value, *needed = values
    changed = take(**chosen(kind, name, (f"{parameter}={value}", *needed)))
    assert differ(changed, take(**chosen(kind, name, tuple(needed))))


@pytest.mark.parametrize(("changed", "needed"), OPTIONS, ids=[str(changed) for changed, _ in OPTIONS])
def test_every_other_option_matters(changed: dict[str, object], needed: dict[str, object], take: Take) -> None:
    assert differ(take(**{**needed, **changed}), take(**needed))


def test_no_parameter_and_no_option_is_forgotten() -> None:
    kinds = ("advantage", "loss", "aggregation", "correction")
    names = [(kind, name, path) for kind in kinds for name, path in registry.BUILTIN[kind].items()]  # type: ignore[index]
    assert set(PARAMETERS) == {
        (kind, name, parameter)
        for kind, name, path in names
        for parameter in registry.parameters_of(pkgutil.resolve_name(path))
    }
    by_name = {f"algorithm.{kind}{suffix}" for kind, suffix in product(kinds, ("", "_args"))}
    options = {name for changed, _ in OPTIONS for name in changed} | by_name
    sections = {"algorithm": AlgorithmConfig, "overlong": OverlongConfig, "distillation": DistillationConfig}
    fields = {f"{name}.{field.name}" for name, kind in sections.items() for field in dataclasses.fields(kind)}
    assert options == fields | {"teacher_model"}
