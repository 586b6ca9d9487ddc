import pytest

from lightrl.records import Prompt, Sample
from lightrl.rewards.expected import expected_answer


def prompted(answer: object) -> Sample:
    return Sample(
        prompt=Prompt(index=0, text="", token_ids=(1,), answer=answer),
        position=0,
        sample_index=0,
        response_ids=(),
        sampler_logprobs=(),
        versions=(),
        finish_reason="stop",
        text="",
    )


def test_the_answer_becomes_stripped_text() -> None:
    assert [expected_answer(prompted(answer)) for answer in (" a b\n", 0, 2.5, False)] == ["a b", "0", "2.5", "False"]


@pytest.mark.parametrize("answer", [None, "", "\n"])
def test_no_answer_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="no answer to compare with"):
        expected_answer(prompted(answer))
