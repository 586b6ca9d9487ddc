"""Stop strings end a sample behind the token that completes the first of them."""

import numpy as np
import pytest

from lightrl.builtin.model import builtin_tokenizer
from lightrl.engines.base import Completion, SamplingParams
from lightrl.engines.stop_strings import check_stop, cut_after_stop, first_stop, stop_tokens


class Syllables:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(["a", "b\n", "\nc", "<en", "d>"][token] for token in token_ids)


def test_the_first_stop_string_counts_wherever_its_tokens_begin() -> None:
    # a b\n \nc <en d> a: the two newlines come from two tokens, and so does <end>
    ids = [0, 1, 2, 3, 4, 0]
    assert first_stop(ids, ("\n\n",), Syllables()) == 3
    assert first_stop(ids, ("<end>", "\n\n"), Syllables()) == 3
    assert first_stop(ids, ("<end>",), Syllables()) == 5
    assert first_stop(ids, ("nowhere",), Syllables()) is None
    assert first_stop([], ("a",), Syllables()) is None


def test_a_completion_is_cut_with_all_that_belongs_to_its_tokens() -> None:
    item = Completion(
        request_id=0, sample_index=0, prompt_token_ids=(0,), output_token_ids=(0, 1, 2, 3),
        logprobs=(1.0, 2.0, 3.0, 4.0), versions=(5, 5, 6, 6), finish_reason="length",
    )  # fmt: skip
    cut = cut_after_stop(item, ("\n\n",), Syllables())
    assert (cut.output_token_ids, cut.logprobs, cut.versions) == ((0, 1, 2), (1.0, 2.0, 3.0), (5, 5, 6))
    assert cut.finish_reason == "stop"
    assert cut_after_stop(item, ("nowhere",), Syllables()) is item


def test_the_experts_of_tokens_that_are_cut_off_go_with_them() -> None:
    # Prompt of 2, response of 4: an engine runs all but the last, so it knows the experts of 5; of 4 if the response
    # has 3.
    item = Completion(
        request_id=0, sample_index=0, prompt_token_ids=(0, 0), output_token_ids=(0, 1, 2, 3),
        logprobs=(0.0,) * 4, versions=(1,) * 4, finish_reason="length", routing=np.zeros((5, 1, 2), np.int16),
        allowed=np.array([[0, 4], [2, 5], [2, 6], [3, 7]], np.int32),
    )  # fmt: skip
    cut = cut_after_stop(item, ("\n\n",), Syllables())
    assert cut.routing is not None
    assert (len(cut.output_token_ids), len(cut.routing)) == (3, 4)
    assert cut.allowed is not None
    assert cut.allowed.tolist() == [[0, 4], [2, 5], [2, 6]]


def test_a_stop_string_within_the_minimum_of_tokens_does_not_count() -> None:
    ids = [0, 1, 2, 0, 3, 4]  # a b\n \nc a <en d>
    found = [first_stop(ids, ("a", "<end>"), Syllables(), after=count) for count in range(7)]
    assert found == [1, 4, 4, 4, 6, 6, None]
    # One that ends right behind the minimum counts, although it begins before.
    assert [first_stop(ids, ("\n\n",), Syllables(), after=count) for count in (2, 3)] == [3, None]


class Bytes:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")


def test_a_character_that_the_minimum_of_tokens_splits_counts() -> None:
    ids = list("ab\U0001f600!".encode())  # a b F0 9F 98 80 !
    found = [first_stop(ids, ("\U0001f600",), Bytes(), after=count) for count in range(8)]
    assert found == [6, 6, 6, 6, 6, 6, None, None]


def test_stop_strings_that_cannot_be_looked_for_are_refused() -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        check_stop(("a",), None)
    for bad in ("a", ("",), (3,)):
        with pytest.raises(ValueError, match="it must be a tuple of texts"):
            check_stop(bad, Syllables())  # type: ignore[arg-type]


def test_what_a_trainer_cannot_reproduce_is_refused() -> None:
    SamplingParams(temperature=0.7, stop=("a",), stop_token_ids=(3,), n=4, seed=2).require_trainable()
    for changes in ({"top_p": 0.9}, {"top_k": 3}, {"min_new_tokens": 1}, {"repetition_penalty": 1.1}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            SamplingParams(**changes).require_trainable()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"adapter=judge: a run trains the policy"):
        SamplingParams(adapter="judge", top_p=0.9).require_trainable(reports_allowed=True)
    assert not SamplingParams(adapter="base").is_trainable
    with pytest.raises(ValueError, match="repetition_penalty is 0"):
        SamplingParams(repetition_penalty=0.0)
    with pytest.raises(ValueError, match="min_new_tokens is -1"):
        SamplingParams(min_new_tokens=-1)


def test_a_stop_string_that_is_one_token_ends_a_sample_in_the_engine() -> None:
    """Otherwise a base model that is to stop at <|im_end|> would write on to its limit every time."""
    tokenizer = builtin_tokenizer()
    pad, four = tokenizer.convert_tokens_to_ids(["<pad>", "4"])
    assert stop_tokens(("<pad>", "4", "42", "none of its tokens"), tokenizer) == (pad, four)
    assert stop_tokens((), tokenizer) == ()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    size = len(tokenizer) - 1  # a model that lacks the token: engines refuse it
    assert stop_tokens(("4", "<|im_end|>"), tokenizer, size) == (four,)


class ByteFallback:
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        try:
            return bytes(token_ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(token_ids)


def test_the_first_bytes_of_a_character_hide_no_stop_string_before_them() -> None:
    ids = list("ab\n\U0001f642c".encode())  # the bytes of a smiley behind the line break
    assert ByteFallback().decode(ids[:5]) == "\ufffd" * 5
    assert [first_stop(ids[:count], ("\n",), ByteFallback()) for count in range(2, 9)] == [None, *[3] * 6]
    assert [first_stop(ids, ("\n", "c"), ByteFallback(), after=count) for count in (2, 3, 5)] == [3, 8, 8]
