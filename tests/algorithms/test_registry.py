from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from packed_tokens import tokens_at
from torch.testing import assert_close

from lightrl.algorithms import advantages, corrections, losses, returns
from lightrl.algorithms.losses import PolicyTokens, TokenLoss, token_loss
from lightrl.algorithms.registry import (
    BUILTIN,
    AdvantageTraits,
    Kind,
    LossTraits,
    ReturnsTraits,
    find,
    load,
    parameters_of,
    traits_of,
)

REQUIRED = {"sequence_mean_token_sum_norm": {"length": 4}}


def my_loss(tokens: PolicyTokens, *, factor: float = 1.0) -> TokenLoss:
    """A user's own loss, of the documented signature."""
    return token_loss(-factor * tokens.masked_advantages, tokens.log_ratio, ~tokens.mask, tokens.mask)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BUILTIN.items() for name in names])
def test_every_name_loads(kind: Kind, name: str) -> None:
    assert callable(load(kind, name, REQUIRED.get(name)))


def test_every_public_algorithm_has_a_name() -> None:
    """A function of a kind that no name leads to would be one that no flag can choose."""
    named = {path for names in BUILTIN.values() for path in names.values()}
    modules = [advantages, corrections, losses, returns]
    kinds = {"ScoredSamples": "Tensor", "TokenRewards": "TokenReturns", "PolicyTokens": "TokenLoss"}
    unnamed = []
    for module in modules:
        for function in vars(module).values():
            if (
                not inspect.isfunction(function)
                or function.__module__ != module.__name__
                or function.__name__[0] == "_"
            ):
                continue
            signature = inspect.signature(function)
            takes = next(iter(signature.parameters.values())).annotation
            gives = signature.return_annotation
            is_kind = kinds.get(takes) == gives or gives in ("TokenWeights", "Correction")
            if is_kind and f"{module.__name__}:{function.__name__}" not in named:
                unnamed.append(function.__name__)
    assert unnamed == ["signal_counts"]  # sums, not an estimate


def test_parameters_are_bound() -> None:
    # -min(1.5 x 2, 1.1 x 2)
    loss = load("loss", "ppo_clip", {"clip_high": 0.1})
    assert_close(loss(tokens_at([1.5], [2.0])).terms, torch.tensor([-2.2], dtype=torch.float64), atol=1e-6, rtol=0)


def test_a_users_own_loss_is_found_by_its_place() -> None:
    loss = load("loss", f"{__name__}:my_loss", {"factor": 3.0})
    assert loss(tokens_at([1.0], [2.0])).terms.tolist() == [-6.0]


def test_a_parameter_that_nothing_reads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"The loss 'sapo' has no parameter clip_low. It has tau_neg, tau_pos."):
        load("loss", "sapo", {"clip_low": 0.2})
    with pytest.raises(ValueError, match=r"The advantage 'rloo' has no parameter eps. It has none."):
        load("advantage", "rloo", {"eps": 0.2})


def test_a_parameter_without_a_default_is_asked_for() -> None:
    with pytest.raises(ValueError, match="The aggregation 'sequence_mean_token_sum_norm' needs a value for length"):
        load("aggregation", "sequence_mean_token_sum_norm")


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"Unknown loss 'ppo_clib'.*ppo_clip.*package.module:my_loss"):
        load("loss", "ppo_clib")


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="is a dict: it must be a function"):
        load("loss", f"{__name__}:REQUIRED")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BUILTIN.items() for name in names])
def test_parameters_are_keyword_only_numbers_or_words(kind: Kind, name: str) -> None:
    parameters = parameters_of(load(kind, name, REQUIRED.get(name)).func)  # type: ignore[attr-defined]
    defaults = [default for default in parameters.values() if default is not inspect.Parameter.empty]
    assert all(default is None or isinstance(default, (bool, int, float, str)) for default in defaults)


def test_built_in_functions_state_their_traits() -> None:
    marked = {name: traits_of(find("advantage", name), AdvantageTraits) for name in BUILTIN["advantage"]}
    assert {name for name, traits in marked.items() if traits.whiten} == {
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "gdpo",
    }
    assert {name for name, traits in marked.items() if traits.min_group == 1} == {
        "reinforce",
        "reinforce_plus_plus",
        "remax",
    }
    assert {name: traits.needs for name, traits in marked.items() if traits.needs} == {
        "remax": ("greedy_baseline",),
        "gpg": ("signal_share",),
        "cpgd": ("signal_share",),
        "gdpo": ("components",),
    }
    selecting = {name for name in BUILTIN["loss"] if traits_of(find("loss", name), LossTraits).selects_tokens}
    assert selecting == {"clip_cov", "kl_cov"}
    critics = {name for name in BUILTIN["returns"] if traits_of(find("returns", name), ReturnsTraits).uses_critic}
    assert critics == {"gae"}


def test_traits_of_a_partial_call_and_of_an_unmarked_function() -> None:
    assert traits_of(load("advantage", "remax"), AdvantageTraits).needs == ("greedy_baseline",)
    assert traits_of(my_loss, LossTraits) == LossTraits()
    assert traits_of(find("advantage", "grpo"), LossTraits) == LossTraits()  # those of another kind say nothing


def documented() -> dict[tuple[str, str], str]:
    """The parameters column of docs/algorithms.md by (kind, name)."""
    rows, kind = {}, ""
    for line in (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 6 and cells[0].startswith("**"):
            kind = cells[0].strip("*").split()[0].strip("*")
        elif len(cells) == 6 and cells[0].startswith("`"):
            rows.setdefault((kind, cells[0].strip("`")), cells[3])
    return rows


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in BUILTIN.items() for name in names])
def test_the_table_states_every_default(kind: Kind, name: str) -> None:
    cell = documented()[kind, name]
    parameters = parameters_of(load(kind, name, REQUIRED.get(name)).func)  # type: ignore[attr-defined]
    stated = dict(part.strip().split(" ")[:2] for part in cell.split(";")[0].split(",")) if cell != "-" else {}
    expected = {key: "(to" if default is inspect.Parameter.empty else default for key, default in parameters.items()}
    assert {key: read(value) for key, value in stated.items()} == expected


def read(value: str) -> float | str | bool | None:
    words = {"True": True, "None": None}
    try:
        return float(value)
    except ValueError:
        return words.get(value, value)
