"""gather_and_generate: one process, two ranks, and two ranks that share their engines' work, give the same samples."""

import json
import sys
from pathlib import Path

import pytest
from torch.testing import assert_close

from lightrl.engines.base import Completion, EnginePrompt
from lightrl.strategy.serving.foreign_inputs import as_item, as_prompt_list, engine_prompts
from lightrl.testing import run_program, run_spmd

PROGRAM = Path(__file__).parents[2] / "programs" / "generate_program.py"


def test_any_spread_gives_the_same_samples(tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("one.json", "two.json", "group.json")]
    run_program([sys.executable, str(PROGRAM), str(outputs[0]), "1", "single"], timeout_s=120)
    run_spmd(PROGRAM, str(outputs[1]), "1", "fsdp", world_size=2, timeout_s=120)
    run_spmd(PROGRAM, str(outputs[2]), "2", "fsdp", world_size=2, timeout_s=120)
    alone, *others = [json.loads(path.read_text()) for path in outputs]
    assert len(alone) == 10
    assert [item["sample_index"] for item in alone] == [0, 1] * 5
    assert len({tuple(item["output_token_ids"]) for item in alone}) > 5
    for other in others:
        for mine, theirs in zip(alone, other, strict=True):
            logprobs = mine.pop("logprobs"), theirs.pop("logprobs")
            assert mine == theirs
            assert_close(*logprobs, atol=1e-5, rtol=0)
            mine["logprobs"], theirs["logprobs"] = logprobs


def test_one_prompt_or_several() -> None:
    assert as_prompt_list([1, 2]) == [[1, 2]]
    assert as_prompt_list([[1], (2, 3)]) == [[1], [2, 3]]
    assert as_prompt_list([]) == []


class Letters:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))


def test_texts_and_token_ids_become_prompts_with_their_media() -> None:
    with pytest.raises(ValueError, match="need a tokenizer"):
        engine_prompts([{"prompt": "a"}], None)
    image = object()  # stands for a PIL image, which is handed on as it is
    made = engine_prompts([{"prompt": "ab"}, {"prompt": [7, 9], "multi_modal_data": {"image": image}}], Letters())
    assert made == [EnginePrompt(token_ids=(97, 98)), EnginePrompt(token_ids=(7, 9), images=(image,))]


def test_a_run_of_placeholders_of_one_image_is_one_again() -> None:
    ids = [5, 9, 9, 9, 6, 9, 9, 5, 5]  # 9 is the placeholder: two images of three and two tokens
    (made,) = engine_prompts([{"prompt": ids, "multi_modal_data": {"image": [object(), object()]}}], None, {9})
    assert made.token_ids == (5, 9, 6, 9, 5, 5)
    (text,) = engine_prompts([{"prompt": ids}], None, {9})  # without an image nothing is expanded
    assert text.token_ids == tuple(ids)


def test_an_item_holds_the_whole_completion() -> None:
    completion = Completion(
        request_id=0,
        sample_index=1,
        prompt_token_ids=(1,),
        output_token_ids=(2, 3),
        logprobs=(-0.5, -0.25),
        versions=(4, 4),
        finish_reason="length",
    )
    item = as_item(completion, None)
    assert (item.output_token_ids, item.logprobs, item.versions) == ([2, 3], [-0.5, -0.25], [4, 4])
    assert (item.finish_reason, item.sample_index, item.text) == ("length", 1, None)
