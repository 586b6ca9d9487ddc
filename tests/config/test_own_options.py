"""Options of one strategy are refused by name where another one trains, before a rank joins the others."""

import pytest

from lightrl.config import EvaluateConfig, GRPOConfig, SFTConfig, check_own_options, parse_config
from lightrl.exact.strategy import exact_strategy
from lightrl.programs import main
from lightrl.roles import Role
from lightrl.strategy import BUILTIN_STRATEGIES, create_strategy
from lightrl.strategy.ddp import DDPStrategy
from lightrl.strategy.deepspeed import DeepSpeedStrategy
from lightrl.strategy.megatron.strategy import MegatronStrategy
from lightrl.trainers.rollout_server import _server_options
from lightrl.trainers.separate import check_split

ZERO = ["--deepspeed.zero_stage", "3", "--deepspeed.offload_param", "True"]
STAGES = ["--megatron.pp_size", "4"]


class OwnZero(DeepSpeedStrategy):
    """A plug-in that inherits what it reads."""


class OwnStages(MegatronStrategy):
    """A plug-in that inherits what it reads."""


class OwnReader(DDPStrategy):
    """A plug-in that reads the options of another back end."""

    own_options = ("deepspeed", "megatron")


class OwnReplicas(DDPStrategy):
    """A plug-in that reads none of them."""


@pytest.mark.parametrize("name", ["auto", "single", "ddp", "fsdp", "megatron", f"{__name__}:OwnReplicas"])
def test_options_of_deepspeed_are_refused_by_name(name: str) -> None:
    config = parse_config(GRPOConfig, ["--strategy", name, *ZERO])
    wanted = (
        rf"\(--strategy {name}\) does not read --deepspeed.zero_stage 3 \(default 2\) and --deepspeed.offload_param "
        r"True \(default False\). Leave the option out, or use --strategy deepspeed."
    )
    with pytest.raises(ValueError, match=wanted):
        create_strategy(config)


@pytest.mark.parametrize("name", ["auto", "ddp", "fsdp", "deepspeed", f"{__name__}:OwnZero"])
@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig])
def test_options_of_megatron_are_refused_by_name(name: str, kind: type[GRPOConfig]) -> None:
    with pytest.raises(ValueError, match=r"does not read --megatron.pp_size 4 \(default 1\)."):
        create_strategy(parse_config(kind, ["--strategy", name, *STAGES]))


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (DeepSpeedStrategy, ZERO),
        (OwnZero, ZERO),
        (MegatronStrategy, STAGES),
        (OwnStages, STAGES),
        (OwnReader, [*ZERO, *STAGES]),
    ],
)
def test_who_reads_them_keeps_them(kind: type[DDPStrategy], given: list[str]) -> None:
    check_own_options(parse_config(GRPOConfig, ["--strategy", "auto", *given]), kind)


@pytest.mark.parametrize("name", ["auto", *BUILTIN_STRATEGIES])
def test_a_file_that_gives_the_defaults_serves_every_strategy(name: str) -> None:
    words = ["--deepspeed.zero_stage", "2", "--megatron.pp_size", "1", "--fsdp.cpu_offload", "True"]
    config = parse_config(GRPOConfig, ["--strategy", name, *words])
    check_own_options(config, DDPStrategy)


def test_the_exact_mode_and_an_evaluation_refuse_them_too() -> None:
    with pytest.raises(ValueError, match="ExactDDPStrategy .* does not read --megatron.pp_size 4"):
        exact_strategy(parse_config(GRPOConfig, ["--strategy", "ddp", "--exact", "True", *STAGES]))
    with pytest.raises(ValueError, match="--megatron.pp_size 4"):
        create_strategy(parse_config(EvaluateConfig, ["--strategy", "single", *STAGES]))


def test_both_roles_of_a_split_run_refuse_them_and_rollout_ranks_need_none() -> None:
    split = ["--rollout_ranks", "1"]
    with pytest.raises(ValueError, match="--deepspeed.zero_stage 3"):
        check_split(parse_config(GRPOConfig, [*split, "--strategy", "fsdp", *ZERO]))
    config = parse_config(GRPOConfig, [*split, "--strategy", "deepspeed", *ZERO])
    check_split(config)
    role = Role(name="rollout", rank=0, num_trainers=1, num_rollout=1)
    create_strategy(_server_options(config, role))


def test_a_plan_refuses_what_the_run_would(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["plan", "grpo", "--ranks", "4", "--strategy", "fsdp", *STAGES])
    assert end.value.code == 2
    assert "does not read --megatron.pp_size 4" in capsys.readouterr().err
