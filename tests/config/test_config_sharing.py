"""--share_prompts True refuses by name what needs whole sequences, and auto leaves it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.config import GRPOConfig, PPOConfig, SFTConfig, parse_config, to_yaml
from lightrl.config.options import changed_options
from lightrl.config.strategy import DistributedConfig, RoutingConfig

WHOLE = [  # options that need whole sequences, and the name in the error of True
    ({"exact": True}, "--exact"),
    ({"strategy": "megatron"}, "--strategy megatron"),
    ({"routing": RoutingConfig(replay=True)}, "--routing.replay"),
    ({"routing": RoutingConfig(balance_coef=0.1)}, "--routing.balance_coef"),
]


def test_a_run_shares_by_itself_where_that_has_been_timed() -> None:
    assert GRPOConfig().share_prompts == "auto"
    assert GRPOConfig().may_share_prompts
    assert PPOConfig(strategy="fsdp", rollout_ranks=1).may_share_prompts
    assert GRPOConfig(strategy="fsdp", sp_size=2).may_share_prompts
    assert not hasattr(SFTConfig(), "may_share_prompts")


@pytest.mark.parametrize(
    "options",
    [
        *(options for options, _ in WHOLE),
        {"share_prompts": True},
        {"share_prompts": False},
        {"dtype": "bfloat16"},
        {"strategy": "deepspeed"},
        {"strategy": "my_package.mine:MyStrategy"},
        {"distributed": DistributedConfig(device="cuda")},
        {"compile": True},
        {"top_k": 5},
    ],
)
def test_a_run_shares_nothing_by_itself_elsewhere(options: dict[str, Any]) -> None:
    assert not GRPOConfig(**options).may_share_prompts


@pytest.mark.parametrize(("options", "named"), WHOLE)
def test_what_needs_whole_sequences_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"--share_prompts does not go with {named}: "):
        GRPOConfig(share_prompts=True, **options)
    assert GRPOConfig(share_prompts=False, **options).share_prompts is False


@pytest.mark.parametrize("value", ["auto", True, False])
def test_flags_files_and_folders_of_runs_say_it_alike(value: str | bool, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(to_yaml(GRPOConfig(share_prompts=value)))
    read = parse_config(GRPOConfig, ["--config", str(file)]).share_prompts
    given = parse_config(GRPOConfig, ["--share_prompts", str(value)]).share_prompts
    assert (read, given) == (value, value)
    assert type(read) is type(given) is type(value)
    assert changed_options(GRPOConfig(), yaml.safe_load(file.read_text())) == []  # a resumed run may change it


def test_other_values_are_refused() -> None:
    for value in ("always", 1, None):
        with pytest.raises(ValueError, match="choose one of auto, True, False"):
            GRPOConfig(share_prompts=value)  # type: ignore[arg-type]
