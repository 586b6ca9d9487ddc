"""Trees on paper."""

from itertools import pairwise
from typing import Any

import pytest

from lightrl.config import GRPOConfig
from lightrl.plan.activations import PackShape, Settings, needs_of
from lightrl.plan.models import policy_of
from lightrl.plan.trees import paper_tree, saved_by

WHOLE = PackShape(num_sequences=8, length=48, num_scored=16)
SHARED = PackShape(num_sequences=8, length=48, num_scored=16, families=(4, 4))


def test_a_tree_by_hand() -> None:
    tree = paper_tree((3, 1), num_shared=20, num_own=2)
    assert tree is not None
    # A prompt of 20 with three responses, and a sequence of its own. The other order is as good.
    assert sorted(end - start for start, end in pairwise(tree.cu_seqlens)) == [2, 2, 2, 20, 22]
    (branch,) = tree.branches
    assert (branch.stop - branch.start, branch.end - branch.stop) == (20, 6)
    assert paper_tree((1, 1), num_shared=20, num_own=2) is None


def test_what_is_saved() -> None:
    assert [saved_by(*sizes) for sizes in ((4, 6), (4, 1), (1, 100))] == [18, 0, 0]  # 3 are too few
    assert SHARED.num_computed == 2 * (32 + 4 * 16)
    assert (WHOLE.num_computed, WHOLE.num_tokens, SHARED.num_tokens) == (384, 384, 384)


@pytest.mark.parametrize("more", [{}, {"checkpointing": True}, {"sp_size": 2}, {"computation": "bfloat16"}])
def test_activations_follow_the_tokens_that_are_computed(small_config: Any, more: dict[str, Any]) -> None:
    model = policy_of(small_config, GRPOConfig())

    def top(pack: PackShape, **settings: Any) -> float:
        return needs_of(model, pack, Settings(**settings, **more)).top

    computed_alone = PackShape(num_sequences=4, length=48, num_scored=16)  # as many tokens: 192
    assert SHARED.num_computed == computed_alone.num_tokens
    assert top(computed_alone) < top(SHARED) < 0.75 * top(WHOLE)  # it scores twice as many


def test_attention_on_an_accelerator_copies_the_keys_of_a_prompt(small_config: Any) -> None:
    model = policy_of(small_config, GRPOConfig())
    there, here = (needs_of(model, SHARED, Settings(on_accelerator=on)).top for on in (True, False))
    # Keys and values of a prompt of 32 tokens, 2 heads of 8 numbers, once more for each of 8 responses in 3 layers.
    copied = 3 * 2 * 8 * 32 * 2 * 8 * 4
    assert there - here > 0.5 * copied
