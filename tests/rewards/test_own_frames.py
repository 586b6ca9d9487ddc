"""A reward that ends a run is shown with the frames of the user's code."""

from typing import Any

import pytest
from made_samples import made_sample

from lightrl.records import Prompt, Sample
from lightrl.rewards import load_reward, own_frames, score
from lightrl.rewards.own_frames import explain
from lightrl.rewards.scoring import RewardError


def judged(answer: str | None) -> Sample:
    prompt = Prompt(index=3, text="1+1=", token_ids=(1,), answer=answer)
    return made_sample(prompt=prompt, sample_index=2, text="2")


@pytest.mark.parametrize(("body", "in_frames"), [("return helper(sample)", True), ("return None", False)])
def test_only_frames_of_the_user_are_shown(body: str, in_frames: bool, tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "mine.py"
    path.write_text(f"def helper(sample):\n    return sample.text[9]\n\n\ndef third(sample):\n    {body}\n")
    with pytest.raises(RewardError) as caught:
        score(load_reward(f"{path}:third"), [judged("2")])
    shown = explain(caught.value)
    assert "lightrl/" not in shown.replace(str(tmp_path), "")
    assert ("mine.py" in shown and "line 2, in helper" in shown and "\nIndexError: " in shown) is in_frames
    assert "prompt 3 '1+1=', sample 2, response '2'" in shown.splitlines()[-1]
    assert shown.splitlines()[-1].startswith("error: The reward 'third'")
    assert "--max_reward_failures" in shown.splitlines()[-1]


def test_a_reward_beside_the_package_is_the_users_and_a_builtin_one_is_not() -> None:
    with pytest.raises(RewardError) as caught:
        score(lambda sample: sample.text[9], [judged("2")])
    assert f'File "{__file__}"' in explain(caught.value)
    with pytest.raises(RewardError) as caught:
        score(load_reward("exact_match"), [judged(None)])
    assert explain(caught.value).startswith("error: The reward 'exact_match' raised ValueError")


def test_a_folder_whose_name_only_begins_like_the_packages_is_the_users() -> None:
    file = f"{own_frames._PACKAGE}_rewards/mine.py"
    names: dict[str, Any] = {}
    exec(compile("def third(sample):\n    return sample.text[9]\n", file, "exec"), names)
    with pytest.raises(RewardError) as caught:
        score(names["third"], [judged("2")])
    assert f'File "{file}", line 2, in third' in explain(caught.value)
