"""Settings of other trainers that change the distribution are refused with the reason."""

from pathlib import Path

import pytest

from lightrl.config import GRPOConfig, RunConfig, SFTConfig, parse_config
from lightrl.config.peer_names import reason_against


def refusal(capsys: pytest.CaptureFixture[str], *argv: str, kind: type[RunConfig] = GRPOConfig) -> str:
    with pytest.raises(SystemExit) as stop:
        parse_config(kind, argv)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "advice"),
    [
        ("--min-tokens", "For evaluation there is --eval.min_new_tokens."),
        ("--rollout.repetition_penalty", "For evaluation there is --eval.repetition_penalty."),
        ("--min_p", "Leave it out."),
    ],
)
def test_settings_that_cannot_be_trained_are_refused_with_the_reason(
    flag: str, advice: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = refusal(capsys, flag, "0.9")
    assert "a trainer computes log-probabilities at --temperature alone" in text
    assert advice in text
    path = tmp_path / "run.yaml"
    path.write_text(f"{flag.removeprefix('--').replace('-', '_')}: 0.9\n")
    assert advice in refusal(capsys, "--config", str(path))
    assert "a trainer computes" not in refusal(capsys, flag, "0.9", kind=SFTConfig)  # which samples nothing
    assert "a trainer computes" not in refusal(capsys, "--eval.top_p", "2")


def test_only_options_of_sampling_have_a_reason() -> None:
    known = ["eval.top_p", "temperature"]
    assert reason_against("min-p", known)
    assert reason_against("lr", known) == ""
    assert reason_against("min_p", ["temperature"]) == ""
