"""--top_p and --top_k in training: which engine they take, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightrl.config import GRPOConfig, PPOConfig
from lightrl.config.evaluate import EvaluateConfig
from lightrl.config.rollout_sections import WorkflowConfig
from lightrl.config.strategy import RoutingConfig
from lightrl.engines.base import check_engine_name


def test_the_engine_is_one_that_reports_the_tokens() -> None:
    assert GRPOConfig().engine_path == "native"
    plain, exact = PPOConfig(top_p=0.9).engine_path, GRPOConfig(top_k=4, exact=True).engine_path
    assert plain != exact
    check_engine_name(plain)
    check_engine_name(exact)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"engine": "vllm"}, "--engine"),
        ({"strategy": "megatron"}, "--strategy"),
        ({"tp_size": 2}, "--tp_size"),
        ({"share_prompts": True}, "--share_prompts"),
        ({"routing": RoutingConfig(replay=True)}, "--routing.replay"),
        ({"rollout_ranks": 1}, "--rollout_ranks"),
        ({"rollout": WorkflowConfig(workflow="multi_turn")}, "--rollout.workflow"),
        ({"rollout": WorkflowConfig(max_staleness=1)}, "--rollout.max_staleness"),
        ({"teacher_model": "a"}, "--teacher_model"),
    ],
)
def test_what_loses_the_tokens_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"--top_p 0.9 and --top_k 0 do not go with {named}: "):
        GRPOConfig(top_p=0.9, **options)


def test_an_evaluation_has_options_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"--eval\.top_p"):
        EvaluateConfig(top_p=0.9)
