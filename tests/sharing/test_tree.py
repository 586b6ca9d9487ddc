"""The tree of a pack: what is computed, in which order, and whose state each token gets."""

from __future__ import annotations

import numpy as np
import pytest

from lightrl.models.policy import response_batch
from lightrl.sharing import tree
from lightrl.sharing.tree import Branch, SharedBatch, num_computed, prefix_tree, share

PROMPT = tuple(range(10, 20))


@pytest.fixture(autouse=True)
def small_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "LEAST_SAVED", 2)


def test_a_prompt_comes_once_and_its_responses_after_it() -> None:
    # Sequences 7 8 | 1 and 7 8 | 3 2 stand at 0 and 3 of the pack, 9 between them at 7.
    tokens = np.array([7, 8, 1, 7, 8, 3, 2, 9])
    found = prefix_tree(tokens, (0, 3, 7, 8))
    assert tokens[found.kept].tolist() == [7, 8, 1, 3, 2, 9]
    assert found.cu_seqlens == (0, 2, 3, 5, 6)
    assert found.branches == (Branch(0, 2, 5),)
    assert found.source.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]


def test_conversations_share_their_history() -> None:
    # 1 2 is common to all three, 1 2 3 4 to the last two; the second ends there.
    tokens = np.array([1, 2, 5, 1, 2, 3, 4, 1, 2, 3, 4, 6])
    found = prefix_tree(tokens, (0, 3, 7, 12))
    assert tokens[found.kept].tolist() == [1, 2, 3, 4, 6, 5]
    assert found.branches == (Branch(0, 2, 6), Branch(2, 4, 5))
    assert found.source.tolist() == [0, 1, 5, 0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_equal_sequences_are_one() -> None:
    found = prefix_tree(np.array([4, 5, 6, 4, 5, 6]), (0, 3, 6))
    assert (found.kept.tolist(), found.branches) == ([0, 1, 2], ())
    assert found.source.tolist() == [0, 1, 2, 0, 1, 2]


def test_a_beginning_that_saves_little_is_not_shared_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token is common to all, which saves 1 token; two of them have four in common, which saves 4."""
    monkeypatch.setattr(tree, "LEAST_SAVED", 3)
    found = prefix_tree(np.array([1, 9, 1, 2, 3, 4, 5, 1, 2, 3, 4, 6]), (0, 2, 7, 12))
    assert found.branches == (Branch(0, 4, 6),)
    assert len(found.kept) == 8
    assert num_computed([(1, 9), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6)]) == 8


def test_long_chains_need_no_deep_recursion() -> None:
    chain = [tuple(range(length)) for length in range(2, 2400, 2)]
    assert num_computed(chain[::-1]) == 2398  # each adds the 2 tokens that it has more


def test_what_a_beginning_saves_depends_on_the_parts_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice four equal sequences share their first token: without it, two parts would begin with it and not eight."""
    monkeypatch.setattr(tree, "LEAST_SAVED", 2)
    ones, others = [(1, 2, 3, 4)] * 4, [(1, 5, 6, 7)] * 4
    assert num_computed([*ones, *others]) == 8  # saves 1 token of 8
    assert num_computed([*ones, *others, (1, 8)]) == 8  # saves 2 of 10


def test_a_pack_without_common_beginnings_stays_as_it_is() -> None:
    batch = response_batch([((1, 2), (3,)), ((4, 5), (6,))])
    assert share(batch) is batch
    shared = share(response_batch([(PROMPT, (1,)), (PROMPT, (2,))]))
    assert isinstance(shared, SharedBatch)
    assert len(shared.tree.kept) == len(PROMPT) + 2
    assert len(shared.input_ids) == 2 * len(PROMPT) + 2
