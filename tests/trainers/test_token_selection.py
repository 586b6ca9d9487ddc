"""Tokens chosen over an update, by hand; that ranks choose alike is shown by the whole program."""

import dataclasses
from types import SimpleNamespace

import pytest
from made_samples import made_sample

from lightrl.comm import Comm
from lightrl.config import AlgorithmConfig
from lightrl.data.packing import TokenMasks
from lightrl.metrics import Statistics
from lightrl.records import Experience
from lightrl.trainers.token_selection import TokenSelector

LOGPROBS = {(0, 0): [-1.0, -2.0], (0, 1): [-3.0], (1, 0): [-0.5, -1.5, -4.0]}
ENTROPY = {(0, 0): [0.1, 0.9], (0, 1): [0.8], (1, 0): [0.2, 0.3, 0.7]}
ADVANTAGES = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.0}


def experience(is_trained: bool = True, version: int = 0) -> list[Experience]:
    return [
        Experience(
            sample=made_sample(
                position=key[0], sample_index=key[1], response_ids=(5,) * len(values), versions=(version,) * len(values)
            ),
            reward=0.0,
            advantage=ADVANTAGES[key],
            is_trained=is_trained or key != (0, 1),
        )
        for key, values in LOGPROBS.items()
    ]


def choose(
    items: list[Experience], seed: int = 0, **algorithm: object
) -> tuple[dict[str, TokenMasks], dict[str, float]]:
    selector = TokenSelector(AlgorithmConfig(**algorithm))  # type: ignore[arg-type]
    statistics = Statistics()
    choice = selector.choose(items, LOGPROBS, ENTROPY, seed=seed, comm=Comm(), statistics=statistics)
    return choice, statistics.reduce(SimpleNamespace(all_gather_object=lambda item: [item]))


def test_kl_cov_selects_the_largest_covariances() -> None:
    # Means over six tokens: log probability -12 / 6 = -2, advantage (1 + 1 - 2) / 6 = 0. Their products by token:
    # (0, 0): 1 x 1 = 1, 0 x 1 = 0; (0, 1): -1 x -2 = 2; (1, 0): advantage 0, so 0, 0, 0. A third of six are two.
    choice, metrics = choose(experience(), loss="kl_cov", selection_args=("fraction=0.34",))
    assert choice == {"selected": {(0, 0): [True, False], (0, 1): [True], (1, 0): [False] * 3}}
    assert metrics == {"selection/selected": pytest.approx(1 / 3)}


def test_clip_cov_draws_among_those_within_its_bounds() -> None:
    # Candidates of covariance 1 and 2; fraction 1/3 of six tokens makes their chance 2 / 2 = 1.
    args = ("fraction=0.33333334", "low=0.5", "high=5")
    choice, _ = choose(experience(), loss="clip_cov", selection_args=args)
    assert choice["selected"] == {(0, 0): [True, False], (0, 1): [True], (1, 0): [False] * 3}
    # Half that fraction selects each by a draw that hangs on its name and the seed.
    args = ("fraction=0.16666667", "low=0.5", "high=5")
    drawn = {str(choose(experience(), seed, loss="clip_cov", selection_args=args)[0]["selected"]) for seed in range(20)}
    assert len(drawn) == 4  # both, neither, one or the other
    assert choose(experience(), 3, loss="clip_cov", selection_args=args) == choose(
        experience(), 3, loss="clip_cov", selection_args=args
    )


def test_the_tokens_of_highest_entropy_stay_in_the_policy_loss() -> None:
    choice, metrics = choose(experience(), entropy_fraction=0.5)
    assert choice == {"in_policy_loss": {(0, 0): [False, True], (0, 1): [True], (1, 0): [False, False, True]}}
    assert metrics == {"selection/in_policy_loss": 0.5}
    # The one token of (0, 1) is not trained: half of the other five are two.
    choice, _ = choose(experience(is_trained=False), entropy_fraction=0.5)
    assert choice["in_policy_loss"] == {(0, 0): [False, True], (0, 1): [False], (1, 0): [False, False, True]}


def test_what_a_tool_wrote_is_not_chosen() -> None:
    """A tool wrote the token of highest entropy; 0.4 of the other five tokens is two."""
    items = experience()
    items[0] = dataclasses.replace(items[0], sample=dataclasses.replace(items[0].sample, own=(True, False)))
    choice, metrics = choose(items, entropy_fraction=0.4)
    assert choice == {"in_policy_loss": {(0, 0): [False, False], (0, 1): [True], (1, 0): [False, False, True]}}
    assert metrics == {"selection/in_policy_loss": pytest.approx(2 / 5)}


def test_a_token_that_is_too_old_takes_no_place_among_the_chosen() -> None:
    items = [dataclasses.replace(item, min_version=2) for item in experience(version=2)]
    aged = dataclasses.replace(items[2].sample, versions=(2, 3, 1))
    items[2] = dataclasses.replace(items[2], sample=aged)
    # Of the five others, three fifths are three: 0.9, 0.8 and 0.3. The one that is too old has 0.7.
    choice, metrics = choose(items, entropy_fraction=0.6)
    assert choice == {"in_policy_loss": {(0, 0): [False, True], (0, 1): [True], (1, 0): [False, True, False]}}
    assert metrics == {"selection/in_policy_loss": pytest.approx(3 / 5)}


def test_a_rank_without_samples_chooses_none() -> None:
    choice, _ = choose([], loss="kl_cov", entropy_fraction=0.5)
    assert choice == {"selected": {}, "in_policy_loss": {}}


@pytest.mark.parametrize(
    ("algorithm", "text"),
    [
        (
            {"selection_args": ("fraction=0.1",)},
            "--algorithm.loss ppo_clip selects no tokens: only clip_cov and kl_cov",
        ),
        ({"loss": "kl_cov", "selection_args": ("low=1",)}, "the selection of kl_cov has no parameter low. It has frac"),
        ({"loss": "clip_cov", "selection_args": ("fraction=0",)}, "fraction is 0"),
    ],
)
def test_what_cannot_be_selected_is_told(algorithm: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TokenSelector(dataclasses.replace(AlgorithmConfig(), **algorithm))  # type: ignore[arg-type]
