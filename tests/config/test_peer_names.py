import re
from pathlib import Path

import pytest

from lightrl.algorithms.registry import BUILTIN
from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, SFTConfig, parse_config
from lightrl.config.options import option_names
from lightrl.config.peer_names import _OFFLINE, _OURS, _VERL, own_names

GUIDE = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
KEY = re.compile(r"`([\w.]+)(?:=[^`]*)?`")


def test_every_name_stands_in_the_guide_and_leads_to_an_option() -> None:
    known = option_names(GRPOConfig)
    for theirs, ours in _OURS.items():
        assert re.search(rf"`(--)?{theirs}\b", GUIDE), theirs
        assert own_names([f"--{theirs}"], known) == ([] if theirs in known else [f"--{theirs} is {ours} here."])
        assert all(name in known for name in re.findall(r"--([\w.]+)", ours)), theirs


def test_every_name_of_the_guide_is_answered() -> None:
    known = option_names(GRPOConfig)
    for section in ("TRL", "OpenRLHF"):
        theirs = {name for row in rows(section) for name in re.findall(r"`(?:--)?(\w+)(?:=[^`]*)?`", row[0])}
        assert len(theirs) > 30
        assert theirs - set(_OURS) - set(known) == set()


def rows(section: str) -> list[list[str]]:
    table = GUIDE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [line.split("|")[1:] for line in table.splitlines() if line.startswith("| `") and "| Here |" not in line]


def test_every_name_of_the_tables_of_offline_training_is_answered() -> None:
    table = GUIDE.partition("\n## SFT, reward models, DPO\n")[2]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    answered: set[str] = set()
    for known in (set(option_names(config)) for config in (SFTConfig, RMConfig, DPOConfig)):
        for left, right in rows:
            named = known & set(re.findall(r"--([a-z_.]+)", right))
            for theirs in set(re.findall(r"`(?:--)?([a-z_]+)", left)) - known if named else ():
                (answer,) = own_names([f"--{theirs}"], known)
                assert set(re.findall(r" --([a-z_.]+)", answer)) & named, answer
                answered.add(theirs)
    assert answered >= set(_OFFLINE)


def test_the_size_of_a_batch_is_answered_by_the_program_it_is_given_to() -> None:
    offline, grpo = option_names(SFTConfig), option_names(GRPOConfig)
    assert own_names(["--num_train_epochs=3"], offline) == ["--num_train_epochs is --num_epochs here."]
    assert own_names(["--num_train_epochs=3"], grpo)[0].startswith("--num_train_epochs is --max_steps (")
    assert own_names(["--per_device_train_batch_size"], offline)[0].partition(" (")[0].endswith("--batch_size")
    for theirs in ("steps_per_generation", "gradient_accumulation_steps"):  # alone, neither is num_minibatches
        (answer,) = own_names([f"--{theirs}"], grpo)
        assert "(steps_per_generation / gradient_accumulation_steps)" in answer


def test_every_key_of_verl_in_the_guide_is_answered_and_no_other() -> None:
    known = {*option_names(GRPOConfig), *option_names(PPOConfig)}
    told: set[str] = set()
    for theirs, ours, *_ in rows("verl"):
        keys = KEY.findall(theirs)
        named = set(re.findall(r"--([a-z_.]+)", ours)) & known
        for key in keys:
            answers = own_names([f"actor_rollout_ref.{key}=1" if key in _VERL else f"--{key}"], known)
            assert bool(answers) == bool(named), key
            assert set(re.findall(r"--([a-z_.]+)", " ".join(answers))) - {key} <= named, key
        told |= set(keys)
    assert set(_VERL) - told == set()


def test_names_that_a_row_lists_in_order_are_answered_in_that_order() -> None:
    known = {*option_names(GRPOConfig), *option_names(PPOConfig)}
    num_pairs = 0
    for theirs, ours, *_ in (row for section in ("TRL", "OpenRLHF", "verl") for row in rows(section)):
        keys, named = re.findall(r"`(?:--)?([\w.]+)", theirs), re.findall(r"`--([\w.]+)[^`]*`(?:, |$)", ours.strip())
        pairs = list(zip(keys, named, strict=True)) if len(keys) == len(named) == ours.count("--") else []
        for key, option in pairs if len(pairs) > 1 else []:
            (answer,) = own_names([f"--{key}"], known - {key})
            assert f"--{option}" in answer.replace(",", " ").split(), (key, answer)
            num_pairs += 1
    assert num_pairs > 20


def test_the_guide_names_estimators_that_exist() -> None:
    """OpenRLHF calls REINFORCE++ `reinforce`, which is another estimator here."""
    rows = [line for line in GUIDE.splitlines() if line.startswith("| `--advantage_estimator`")]
    names = dict(re.findall(r"`(\w+)` is `(\w+)`", rows[0]))
    assert names["reinforce"] == "reinforce_plus_plus"
    assert set(names.values()) < set(BUILTIN["advantage"])


def test_a_name_of_another_trainer_is_answered_by_ours(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_config(GRPOConfig, ["--learning-rate=3e-6", "--nothing", "1"])
    assert end.value.code == 2
    told = capsys.readouterr()
    assert "--learning_rate is --lr here." in told.out + told.err


def test_it_is_answered_in_a_file_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("num_generations: 8\n")
    with pytest.raises(SystemExit):
        parse_config(GRPOConfig, ["--config", str(tmp_path / "run.yaml")])
    assert "unknown option 'num_generations'. --num_generations is --group_size here." in capsys.readouterr().err


def test_a_file_of_verl_is_answered_key_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "verl.yaml").write_text("data: {train_files: a}\nactor_rollout_ref: {rollout: {n: 8}}\nlr: 1e-6\n")
    with pytest.raises(SystemExit):
        parse_config(GRPOConfig, ["--config", str(tmp_path / "verl.yaml")])
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("unknown option 'data.train_files'. data.train_files is --train_data here.")
    assert second == (
        "  unknown option 'actor_rollout_ref.rollout.n'. actor_rollout_ref.rollout.n is --group_size here."
    )


def test_words_of_its_command_line_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(GRPOConfig, ["actor_rollout_ref.actor.clip_ratio_high=0.28", "+trainer.total_epochs=2"])
    told = capsys.readouterr().err
    assert "error: actor_rollout_ref.actor.clip_ratio_high is --algorithm.clip_high here.\n" in told
    assert "error: trainer.total_epochs is --max_steps (records / num_prompts for each epoch) here.\n" in told


def test_names_that_the_program_has_or_cannot_offer_are_left_alone() -> None:
    assert own_names(["--beta", "1", "learning_rate"], {"lr"}) == []
    assert own_names(["--learning_rate"], {"learning_rate", "lr"}) == []
    assert own_names(["--rollout.workflow_args", "tools=calculator"], {"rollout.workflow"}) == []  # a value, no key


@pytest.mark.parametrize(
    ("config", "words", "wanted"),
    [
        (GRPOConfig, ["--critic_lr", "1"], "--critic_lr is an option of lightrl train ppo, not of this program."),
        (SFTConfig, ["--top-p=0.9"], "--top_p is an option of lightrl train grpo|ppo, not of this program."),
        (GRPOConfig, ["--config", "ppo.yaml"], "unknown option 'critic_lr'. --critic_lr is an option of lightrl train"),
    ],
)
def test_an_option_of_another_program_is_told_to_be_one(
    config: type,
    words: list[str],
    wanted: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ppo.yaml").write_text("critic_lr: 1\n")
    with pytest.raises(SystemExit):
        parse_config(config, words)
    assert wanted in capsys.readouterr().err


def test_a_flag_that_has_another_name_here_is_not_said_to_be_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(GRPOConfig, ["--beta", "0.1"])
    told = capsys.readouterr().err
    assert "--beta is --algorithm.kl_coef here." in told
    assert "an option of" not in told
