import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from lightrl.config import (
    AlgorithmConfig,
    CriticConfig,
    DPOConfig,
    GRPOConfig,
    JudgeConfig,
    OfflineConfig,
    PairDataConfig,
    PPOAlgorithmConfig,
    PPOConfig,
    ResponseDataConfig,
    RMConfig,
    RunConfig,
    SFTConfig,
    as_dict,
    option_names,
    parse_config,
    to_yaml,
)

KINDS = (GRPOConfig, PPOConfig, SFTConfig, RMConfig, DPOConfig)
REQUIRED_FLAGS = (
    "model", "strategy", "engine", "train_data", "eval_data", "reward", "seed", "max_steps", "output_dir", "resume",
    "num_prompts", "group_size", "max_new_tokens", "temperature", "lr", "config", "max_tokens_per_microbatch",
)  # fmt: skip


def fail(capsys: pytest.CaptureFixture[str], *argv: str, kind: type[RunConfig] = GRPOConfig) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_config(kind, argv)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    text = (captured.out + captured.err).replace("\u2502", " ")  # tyro frames and wraps its messages
    return " ".join(text.split())


def test_flags_with_underscores_or_dashes() -> None:
    config = parse_config(GRPOConfig, ["--num_prompts", "8", "--group-size", "4", "--fsdp.cpu_offload", "True"])
    assert (config.num_prompts, config.group_size, config.fsdp.cpu_offload) == (8, 4, True)
    assert set(REQUIRED_FLAGS) <= set(option_names(GRPOConfig))


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_described_in_the_help(kind: type[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_config(kind, ["--help-all"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name in option_names(kind):
        assert re.search(rf"^--{name.rstrip('_')} .+\n    [A-Za-z0-9-]", text, re.MULTILINE), name


def test_flags_win_over_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 2e-6\nnum_prompts: 4\noptim:\n  betas: [0.8, 0.9]\nfsdp:\n  cpu_offload: true\n")
    config = parse_config(GRPOConfig, ["--config", str(path), "--num_prompts", "2"])
    assert (config.lr, config.num_prompts, config.optim.betas) == (2e-6, 2, (0.8, 0.9))
    assert config.fsdp.cpu_offload is True


def test_a_saved_config_reads_back(tmp_path: Path) -> None:
    config = parse_config(GRPOConfig, ["--lr", "3e-6", "--optim.betas", "0.7", "0.8", "--model", "x: y"])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    again = parse_config(GRPOConfig, [f"--config={path}"])
    assert dataclasses.asdict(again) == {**dataclasses.asdict(config), "config": str(path)}
    assert yaml.safe_load(path.read_text()) == as_dict(config)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--stratgy", "fsdp"], "--strategy STR"),
        (["--config", "", "--max_steps", "1"], "--config is empty"),
        (["--config="], "Name a file, or leave it out"),
        (["--fsdp.cpu_offlod", "True"], "--fsdp.cpu_offload {True,False}"),
        (["--lr", "fast"], "Error parsing --lr: could not convert string to float: 'fast'"),
        (["--dtype", "float8"], "invalid choice 'float8' for argument '--dtype'"),
        (
            ["--num_prompts", "10", "--num_minibatches", "4"],
            "--num_prompts 10 cannot be split evenly into --num_minibatches 4. Nearest valid --num_prompts: 8 or 12.",
        ),
        (["--num_prompts", "0"], "--num_prompts is 0: it must be between 1 and 1000000"),
        (["--temperature", "0"], "--temperature is 0.0: it must be above 0"),
        (["--engine_args", "x"], "--engine_args 'x': it must be name=value"),
        (["--engine_args", "x=1", "x=2"], "--engine_args: x is given twice"),
        (["--engine_mem_fraction", "1.5"], "--engine_mem_fraction is 1.5: it must be between 0 and 1"),
        (["--lr", "-1"], "--lr is -1.0: it must be 0 or above"),
        (["--lr", "inf"], "--lr is inf: it must be a finite number"),
        (["--optim.betas", "2", "3"], "it must be two numbers in [0, 1)"),
        (["--algorithm.kl_target", "0.1"], "needs a --algorithm.kl_coef above 0 to start from"),
        (["--algorithm.kl_coef", "1", "--algorithm.kl_target", "1", "--algorithm.kl_horizon", "9"], "at least 2560"),
        (["--algorithm.entropy_target", "1", "--algorithm.entropy_coef", "-1"], "entropy_coef -1.0 is negative"),
        (["--algorithm.entropy_step", "0"], "--algorithm.entropy_step is 0.0: it must be above 0"),
        (["--algorithm.entropy_fraction", "0"], "--algorithm.entropy_fraction is 0.0: it is a share of the tokens"),
        (["--dynamic_sampling.max_rounds", "0"], "--dynamic_sampling.max_rounds is 0: it must be at least 1"),
        (["--dynamic_sampling.oversample", "0.5"], "--dynamic_sampling.oversample is 0.5: it must be between 1 and"),
        (["--dynamic_sampling.carry_over", "-1"], "--dynamic_sampling.carry_over is -1: it must be 0 or above"),
        (
            ["--dynamic_sampling.enabled", "True", "--group_size", "1", "--algorithm.advantage", "remax"],
            "--dynamic_sampling.enabled compares the rewards of a group, but --group_size is 1",
        ),
        (["--overlong.buffer", "9"], "--overlong.buffer is 9: it must be between 0 and --max_new_tokens 8"),
        (["--overlong.penalty", "2"], "--overlong.penalty does nothing without --overlong.buffer"),
        (["--algorithm.kl_estimator", "k1"], "--algorithm.kl_estimator does nothing without --algorithm.kl_coef"),
        (["--algorithm.kl_estimator_args", "a=1"], "kl_estimator_args does nothing without --algorithm.kl_coef"),
        (["--algorithm.kl_gradient", "kl"], "--algorithm.kl_gradient does nothing without --algorithm.kl_coef"),
        (
            ["--algorithm.kl_coef", "1", "--algorithm.kl_estimator", "k1"],
            "the mean of its own gradient is 0. Add --algorithm.kl_gradient kl",
        ),
        (["--algorithm.kl_coef", "1", "--algorithm.kl_horizon", "9999"], "without --algorithm.kl_target: give both"),
        (["--algorithm.entropy_step", "0.1"], "--algorithm.entropy_step does nothing without --algorithm.entropy_t"),
        (["--dynamic_sampling.max_rounds", "9"], "max_rounds does nothing without --dynamic_sampling.enabled"),
        (["--dynamic_sampling.oversample", "9"], "oversample does nothing without --dynamic_sampling.enabled"),
        (["--dynamic_sampling.carry_over", "9"], "carry_over does nothing without --dynamic_sampling.enabled"),
        (["--distillation.coef", "2"], "The options --distillation... do nothing without --teacher_model"),
        (["--teacher_model", "x", "--distillation.coef", "0"], "--distillation.coef is 0.0: it must be above 0"),
        (["--seed", "99999999999999999999999"], "it must fit in 64 bits"),
        (["--checkpoint.keep", "0"], "--checkpoint.keep is 0: it must be at least 1"),
    ],
)
def test_a_mistake_ends_with_code_2_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert text in fail(capsys, *argv)


def test_the_last_value_of_an_option_counts_with_a_note_if_it_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(GRPOConfig, ["--lr", "1", "--optim.betas", "0", "0", "--lr=2", "--optim.betas", "0.5", "0.9"])
    assert (config.lr, config.optim.betas) == (2.0, (0.5, 0.9))
    assert not capsys.readouterr().err
    config = parse_config(
        GRPOConfig, ["--reward", "a", "--optim.lr-scales=x=1", "--reward=b", "--optim.lr_scales", "y=1"]
    )
    assert (config.reward, config.optim.lr_scales) == (("b",), ("y=1",))
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        f"note: --{name} is given 2 times, and only the last one counts. To give several values, write them behind one "
        f"--{name}."
        for name in ("optim.lr_scales", "reward")
    ]


def test_an_estimator_of_ones_own_may_take_a_group_of_one() -> None:
    """What an estimator needs is a trait of its function, which a config does not load."""
    config = GRPOConfig(group_size=1, algorithm=AlgorithmConfig(advantage="my_advantages:mine"))
    assert config.samples_per_step == 16


def test_k1_goes_with_the_gradient_of_the_kl_and_in_the_reward() -> None:
    k1 = AlgorithmConfig(kl_coef=0.1, kl_estimator="k1", kl_gradient="kl")
    assert GRPOConfig(algorithm=k1).algorithm == k1
    in_reward = PPOAlgorithmConfig(kl_coef=0.1, kl_in_reward="k1")
    assert PPOConfig(algorithm=in_reward).algorithm == in_reward


def test_an_option_may_be_none_where_its_type_says_so(tmp_path: Path) -> None:
    config = GRPOConfig(algorithm=AlgorithmConfig(clip_high=0.28))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert "  clip_low: null\n" in to_yaml(config)
    assert parse_config(GRPOConfig, ["--config", str(tmp_path / "config.yaml")]).algorithm == config.algorithm
    with pytest.raises(TypeError, match=r"algorithm.clip_low must be float \| None, not '0.2'"):
        GRPOConfig(algorithm=AlgorithmConfig(clip_low="0.2"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--critic.value_coef", "0"], "--critic.value_coef is 0.0: it must be above 0"),
        (["--critic.head_init_std", "-1"], "--critic.head_init_std is -1.0: it must be 0 or above"),
        (["--critic_lr", "nan"], "--critic_lr is nan"),
        (["--algorithm.kl_in_reward", "k1"], "needs a --algorithm.kl_coef above 0"),
        (
            ["--algorithm.kl_in_reward", "k1", "--algorithm.kl_coef", "1", "--algorithm.kl_estimator", "k2"],
            "apply to the KL in the loss, and --algorithm.kl_in_reward k1 takes it out of there",
        ),
        (["--critic.shared_backbone", "True", "--critic.policy_frozen_steps", "1"], "use --critic_warmup_steps"),
        (["--critic.shared_backbone", "True", "--critic_model", "x"], "Leave one of them out"),
        (["--algorithm.reward_at", "turns"], "needs --reward episode, with no other weight than 1; it is exact_match"),
        (["--algorithm.reward_at", "turns", "--reward", "episode=0.5"], "it is episode=0.5"),
        (["--algorithm.reward_at", "turns", "--reward", "episode", "--algorithm.reward_clip", "1"], "leave out"),
    ],
)
def test_what_ppo_cannot_do_is_told(capsys: pytest.CaptureFixture[str], argv: list[str], text: str) -> None:
    assert text in fail(capsys, *argv, kind=PPOConfig)


def test_a_saved_value_may_begin_with_dashes(tmp_path: Path) -> None:
    config = GRPOConfig(judge=JudgeConfig(prompt="--- {response}", url="http://127.0.0.1:1/v1"))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert parse_config(GRPOConfig, ["--config", str(tmp_path / "config.yaml")]).judge == config.judge


@pytest.mark.parametrize("stop", [(), ("-a",), ("--lr", "b", "- c"), ("-", "-1")])
def test_the_first_of_several_values_may_begin_with_dashes(tmp_path: Path, stop: tuple[str, ...]) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(GRPOConfig(stop=stop)))
    assert parse_config(GRPOConfig, ["--config", str(tmp_path / "config.yaml")]).stop == stop
    if stop:
        assert parse_config(GRPOConfig, [f"--stop={stop[0]}", *stop[1:]]).stop == stop


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("fsdp:\n  cpu_offlod: true\n", "unknown option 'fsdp.cpu_offlod'. Did you mean fsdp.cpu_offload"),
        ("algoritm:\n  loss: gspo\n", "unknown option 'algoritm.loss'. Did you mean algorithm.loss"),
        ("critics:\n  value_clip: 1\n", "unknown option 'critics.value_clip'. This program has no section 'critics'."),
        ("quux: 1\n", "unknown option 'quux'. --help lists all options."),
        ("- a\n- b\n", "must hold `option: value` lines, not a list"),
        ("lr: [1\n", "is not valid YAML"),
        ("lr: fast\n", "Error parsing --lr"),
        ("num_prompts: [4, 5]\n", "num_prompts is [4, 5]: it takes one value, not a list"),
        ("output_dir:\n", "output_dir has no value. Give one, or leave the line out"),
    ],
)
def test_a_mistake_in_the_yaml_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, text: str
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    message = fail(capsys, "--config", str(path))
    assert text in message


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_steps": 1.5}, "max_steps must be int, not 1.5"),
        ({"dtype": "float16"}, "dtype is 'float16': choose one of float32, bfloat16"),
        ({"lr": "1e-4"}, "lr must be float, not '1e-4'"),
        ({"optim": {"eps": 1}}, "optim must be a OptimConfig"),
        ({"train_data": None}, "train_data must be str, not None"),
    ],
)
def test_a_config_built_in_python_is_checked_too(values: dict[str, object], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        GRPOConfig(**values)  # type: ignore[arg-type]


def test_a_missing_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--config nowhere.yaml: there is no such file" in fail(capsys, "--config", "nowhere.yaml")


def test_every_rank_tells_which_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert fail(capsys, "--config", "nowhere.yaml").startswith("[rank 3] error:")


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_read_somewhere(kind: type[RunConfig]) -> None:
    """A flag that nothing reads is a lie: each name must occur in the package beside its declaration."""
    package = Path(__file__).parents[2] / "lightrl"
    declared = {package / "config" / name for name in ("runs.py", "sections.py", "rollout_sections.py", "strategy.py")}
    source = "\n".join(path.read_text() for path in package.rglob("*.py") if path not in declared)
    names = {name: name.rpartition(".")[2] for name in option_names(kind)}
    unread = [name for name, last in names.items() if not re.search(rf"\.{last}\b", source)]
    assert unread == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--lora.rank", "-1"], "--lora.rank is -1: it must be 0 or above"),
        (["--lora.rank", "4", "--lora.alpha", "inf"], "--lora.alpha is inf: it must be a finite number"),
        (["--lora.alpha", "16"], "describe new adapters: give --lora.rank too"),
        (["--lora.target_modules", "q_proj"], "give --lora.rank too"),
        (["--lora.path", "x", "--lora.use_rslora", "True"], "An adapter of --lora.path has its own"),
        (["--lora.path", "x", "--lora.rank", "4"], "--lora.path comes with its own rank"),
        (["--lora.rank", "4", "--tp_size", "2"], "--tp_size 2 cannot cut adapters"),
        (["--lora.rank", "4", "--lora.target_modules", "q_proj", "all-linear"], "all-linear stands alone"),
    ],
)
def test_lora_options_that_say_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], argv: list[str], text: str
) -> None:
    assert text in fail(capsys, *argv)
    assert parse_config(GRPOConfig, ["--lora.rank", "4", "--lora.target_modules", "q_proj", "v_proj"]).lora.is_on


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (SFTConfig, {"batch_size": 0}, "--batch_size is 0: it must be at least 1"),
        (SFTConfig, {"num_epochs": 0}, "--num_epochs is 0: it must be at least 1"),
        (SFTConfig, {"data": ResponseDataConfig(max_tokens=-1)}, "--data.max_tokens is -1: it must be 0 or above"),
        (SFTConfig, {"data": PairDataConfig()}, "data must be a ResponseDataConfig"),
        (RMConfig, {"centring_coef": -0.01}, "--centring_coef is -0.01: it must be 0 or above"),
        (DPOConfig, {"beta": 0.0}, "--beta is 0.0: it must be above 0"),
        (DPOConfig, {"label_smoothing": 0.5}, "--label_smoothing is 0.5: it must be at least 0 and below 0.5"),
        (DPOConfig, {"label_smoothing": 0.1, "loss": "ipo"}, "--label_smoothing belongs to --loss sigmoid, not to ipo"),
        (DPOConfig, {"loss": "kto"}, "choose one of sigmoid, ipo, hinge"),
    ],
)
def test_options_of_offline_training_are_checked(
    kind: type[OfflineConfig], values: dict[str, object], text: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(text)):
        kind(**values)


@pytest.mark.parametrize("kind", [SFTConfig, RMConfig, DPOConfig])
def test_offline_training_has_no_option_of_rollouts(kind: type[OfflineConfig]) -> None:
    names = set(option_names(kind))
    assert {"batch_size", "num_epochs", "data.too_long", "eval.max_examples"} <= names
    assert not names & {"engine", "reward", "num_prompts", "data.answer_field", "eval.temperature", "temperature"}
    assert not [name for name in names if name.startswith(("native.", "algorithm.", "log.samples"))]


def test_a_frozen_policy_has_a_shorter_schedule() -> None:
    """Of 10 steps with 2 x 3 updates each the policy sits out 4."""
    shape = {"max_steps": 10, "num_prompts": 6, "num_minibatches": 3, "num_epochs": 2}
    config = PPOConfig(critic=CriticConfig(policy_frozen_steps=4), **shape)  # type: ignore[arg-type]
    assert (config.schedule_length, config.policy_schedule_length) == (60, 36)
    config.optim.schedule_unit = "rl_step"
    assert (config.schedule_length, config.policy_schedule_length) == (10, 10)
    assert PPOConfig(critic=CriticConfig(policy_frozen_steps=40), **shape).policy_schedule_length == 0  # type: ignore[arg-type]
    assert GRPOConfig(**shape).policy_schedule_length == 60  # type: ignore[arg-type]


def test_one_text_is_a_list_of_one_in_python() -> None:
    config = GRPOConfig(reward="contains", engine_args="a=1", algorithm=AlgorithmConfig(loss_args="dual_clip=3"))  # type: ignore[arg-type]
    assert config.reward == ("contains",)
    assert config.engine_args == ("a=1",)
    assert config.algorithm.loss_args == ("dual_clip=3",)


def test_stop_strings_are_texts_with_something_in_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text('stop: ["\\n", "</answer>"]\n')
    assert parse_config(GRPOConfig, ["--config", str(path)]).stop == ("\n", "</answer>")
    assert "--stop has an empty text" in fail(capsys, "--stop", "a", "")


@pytest.mark.parametrize("more_updates", [{"num_minibatches": 2}, {"num_epochs": 2}, {}])
def test_several_updates_and_older_samples_need_scores_before_the_first_update(more_updates: dict[str, int]) -> None:
    """Unless the ratio compares with the engine; a selection needs the trainer's own scores all the same."""
    is_needed = bool(more_updates)
    for old_logprobs in ("recompute", "engine"):
        recomputes = old_logprobs == "recompute"
        grpo = GRPOConfig(algorithm=AlgorithmConfig(old_logprobs=old_logprobs), **more_updates)  # type: ignore[arg-type]
        assert grpo.scores_first(has_older=False, selects=False) is (is_needed and recomputes)
        assert grpo.scores_first(has_older=True, selects=False) is recomputes
        assert grpo.scores_first(has_older=False, selects=True)
        ppo = PPOConfig(algorithm=PPOAlgorithmConfig(old_logprobs=old_logprobs), **more_updates)  # type: ignore[arg-type]
        assert ppo.scores_first(has_older=False, is_frozen=False) is (is_needed and recomputes)
        assert ppo.scores_first(has_older=True, is_frozen=False) is recomputes
        assert ppo.scores_first(has_older=False, is_frozen=True) is recomputes
    in_reward = PPOAlgorithmConfig(kl_coef=0.1, kl_in_reward="k1", proximal="interpolate")
    assert PPOConfig(algorithm=in_reward).scores_first(has_older=True, is_frozen=False)
