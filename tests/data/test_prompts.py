from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_vlm import IMAGE, VIDEO, checkered, frames, tiny_media
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lightrl.data.json_records import LocatedRecord
from lightrl.data.media_fields import MediaFields
from lightrl.data.prompts import build_fitting_prompts, build_prompts, load_records, require_field
from lightrl.data.streamed import Streamed
from lightrl.records import Prompt

WORDS = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "add", "two", "three", "be", "brief", "<system>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %} <{{ message.role }}> {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %} <assistant>{% endif %}"
)


def word_tokenizer(chat_template: str | None = None, adds: str = "<s> $A") -> PreTrainedTokenizerFast:
    """A token for each word, numbered as in WORDS, with BOS (1) before a text unless `adds` says otherwise."""
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=[("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=chat_template,
    )


def at(*records: dict[str, Any]) -> list[LocatedRecord]:
    return [(record, f"data.jsonl:{line}") for line, record in enumerate(records, start=1)]


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_field_that_no_record_has_is_refused() -> None:
    records = [({"prompt": "1+1=", "answer": "2"}, "a:1"), ({"prompt": "2+2=", "size": None}, "a:2")]
    require_field(records, "answer", "--data.answer_field")
    with pytest.raises(ValueError, match=r"'size' \(--eval.source_field\). They have answer, prompt, size \(null\)\."):
        require_field(records, "size", "--eval.source_field")


def test_a_null_field_counts_as_left_out() -> None:
    """As in a columnar format, where every record has every field."""
    records = [{"messages": [{"role": "user", "content": "add"}], "prompt": None}, {"messages": None, "prompt": "two"}]
    prompts = build_prompts(at(*records), word_tokenizer(TEMPLATE), max_prompt_tokens=9, chat_template="never")
    assert [prompt.token_ids for prompt in prompts] == [(1, 3, 5, 4), (1, 6)]


def test_builtin_tasks() -> None:
    train, heldout = load_records("builtin:addition"), load_records("builtin:addition-heldout")
    assert train[0][1] == "builtin:addition: row 1"
    assert set(train[0][0]) == {"prompt", "answer"}
    assert not {record["prompt"] for record, _ in train} & {record["prompt"] for record, _ in heldout}
    with pytest.raises(ValueError, match="built-in task 'additon'. Choose one of addition, addition-heldout."):
        load_records("builtin:additon")


def test_a_raw_string_keeps_its_text_and_every_other_field() -> None:
    records = at({"prompt": "add two", "answer": "2", "level": 3, "tags": ["x"]}, {"prompt": "three"})
    first, second = build_prompts(records, word_tokenizer(), max_prompt_tokens=3)
    assert (first.index, first.text, first.token_ids) == (0, "add two", (1, 5, 6))
    assert (first.answer, first.fields) == ("2", {"level": 3, "tags": ["x"]})
    assert (second.index, second.text, second.token_ids, second.answer, second.fields) == (1, "three", (1, 7), None, {})
    assert pickle.loads(pickle.dumps(first)) == first


def test_other_names_for_the_fields() -> None:
    records = at({"question": "add", "solution": 5, "prompt": "kept"})
    (prompt,) = build_prompts(
        records, word_tokenizer(), prompt_field="question", answer_field="solution", max_prompt_tokens=9
    )
    assert (prompt.text, prompt.answer, prompt.fields) == ("add", 5, {"prompt": "kept"})


def test_an_answer_inside_another_field() -> None:
    inside = {"style": "rule", "ground_truth": 5}
    records = at({"prompt": "add", "reward_model": inside}, {"prompt": "two", "reward_model.ground_truth": 6})
    records += at({"prompt": "add", "reward_model": "5"})
    name = "reward_model.ground_truth"
    prompts = build_prompts(records, word_tokenizer(), answer_field=name, max_prompt_tokens=9)
    assert [prompt.answer for prompt in prompts] == [5, 6, None]
    assert prompts[0].fields == {"reward_model": inside}
    require_field(records, name, "--data.answer_field")
    with pytest.raises(ValueError, match=r"No record has the field 'reward_model.truth'"):
        require_field(records, "reward_model.truth", "--data.answer_field")


@pytest.mark.parametrize("chat_template", ["auto", "always"])
def test_a_string_becomes_one_user_message_with_a_single_bos(chat_template: Any) -> None:
    (prompt,) = build_prompts(
        at({"prompt": "add two"}), word_tokenizer(TEMPLATE), max_prompt_tokens=9, chat_template=chat_template
    )
    assert prompt.text == "<s> <user> add two <assistant>"
    assert prompt.token_ids == (1, 3, 5, 6, 4)


def test_never_leaves_a_string_raw() -> None:
    (prompt,) = build_prompts(
        at({"prompt": "add two"}), word_tokenizer(TEMPLATE), max_prompt_tokens=9, chat_template="never"
    )
    assert (prompt.text, prompt.token_ids) == ("add two", (1, 5, 6))


@pytest.mark.parametrize("field", ["messages", "prompt"])
@pytest.mark.parametrize("chat_template", ["auto", "never"])
def test_messages_are_always_rendered(field: str, chat_template: Any) -> None:
    messages = [{"role": "system", "content": "be brief", "name": None}, {"role": "user", "content": "add"}]
    (prompt,) = build_prompts(
        at({field: messages, "level": 1}), word_tokenizer(TEMPLATE), max_prompt_tokens=9, chat_template=chat_template
    )
    assert prompt.text == "<s> <system> be brief <user> add <assistant>"
    assert prompt.token_ids == (1, 10, 8, 9, 3, 5, 4)
    assert prompt.messages == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "add"})
    assert prompt.fields == {"level": 1}


def test_a_raw_string_that_has_its_bos_gets_no_second() -> None:
    (prompt,) = build_prompts(at({"prompt": "<s> add"}), word_tokenizer(), max_prompt_tokens=9)
    assert prompt.token_ids == (1, 5)


def test_an_eos_that_the_tokenizer_adds_is_left_out_and_one_in_the_text_stays() -> None:
    tokenizer = word_tokenizer(adds="<s> $A </s>")
    first, second = build_prompts(at({"prompt": "add"}, {"prompt": "add </s>"}), word_tokenizer(), max_prompt_tokens=9)
    assert (first.token_ids, second.token_ids) == ((1, 5), (1, 5, 2))
    (prompt,) = build_prompts(at({"prompt": "add"}), tokenizer, max_prompt_tokens=9)
    assert prompt.token_ids == (1, 5)


MESSAGE = {"role": "user", "content": "add"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "add"}, r"neither 'prompt' nor 'messages', only \['text'\]. .* by --data.prompt_field"),
        ({"prompt": None}, "neither 'prompt' nor 'messages'"),
        ({"prompt": " \n"}, "'prompt' is empty"),
        ({"prompt": 3}, "'prompt' is of type int. It must be a string, or a list of messages"),
        ({"prompt": []}, "'prompt' is an empty list"),
        ({"messages": ["add"]}, r"messages\[0\] is 'add'. A message must be"),
        ({"messages": [MESSAGE, {"role": "user"}]}, r"messages\[1\] is .* A message must be"),
        ({"messages": [MESSAGE, {"role": "user", "content": 3}]}, r"messages\[1\] is .* A message must be"),
        ({"messages": [MESSAGE, {"role": "assistant", "content": "5"}]}, "the last message is the assistant's"),
    ],
)
def test_a_record_that_cannot_be_used_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="data.jsonl:2: .*" + message):
        build_prompts(at({"prompt": "add"}, record), word_tokenizer(TEMPLATE), max_prompt_tokens=9)


def test_an_answer_that_has_been_begun_is_continued_as_its_refusal_says() -> None:
    messages, tokenizer = [MESSAGE, {"role": "assistant", "content": "two"}], word_tokenizer(TEMPLATE)
    settings: dict[str, Any] = {"max_prompt_tokens": 9, "chat_template": "never"}
    with pytest.raises(ValueError, match=r"continue_final_message=True\) returns, with --data.chat_template never\."):
        build_prompts(at({"messages": messages}), tokenizer, **settings)
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    (prompt,) = build_prompts(at({"prompt": text}), tokenizer, **settings)
    assert prompt.token_ids == (1, 3, 5, 4, 6)  # one <s>, and no second <assistant>


def test_messages_without_a_chat_template_are_refused() -> None:
    with pytest.raises(ValueError, match="data.jsonl:1: 'messages' is to be rendered .* the tokenizer has none"):
        build_prompts(at({"messages": [MESSAGE]}), word_tokenizer(), max_prompt_tokens=9)
    with pytest.raises(ValueError, match="the tokenizer has none"):
        build_prompts(at({"prompt": "add"}), word_tokenizer(), max_prompt_tokens=9, chat_template="always")


def test_what_the_chat_template_refuses_is_named() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="data.jsonl:1: the tokenizer's chat template refuses .*roles must alternate"):
        build_prompts(at({"messages": [MESSAGE]}), word_tokenizer(template), max_prompt_tokens=9)


def test_a_prompt_at_the_limit_passes_and_one_token_more_is_refused() -> None:
    records = at({"prompt": "add"}, {"prompt": "add two three"})
    assert len(build_prompts(records, word_tokenizer(), max_prompt_tokens=4)) == 2
    with pytest.raises(
        ValueError,
        match="data.jsonl:2: the prompt has 4 tokens, and there is room for 3. .*--max_new_tokens.* a longer context",
    ):
        build_prompts(records, word_tokenizer(), max_prompt_tokens=3)


def test_no_records_and_an_unknown_template_use_are_refused() -> None:
    with pytest.raises(ValueError, match="the data set is empty"):
        build_prompts([], word_tokenizer(), max_prompt_tokens=9)
    unknown: Any = "nevr"
    with pytest.raises(ValueError, match="chat_template is 'nevr': choose one of auto, always, never"):
        build_prompts(at({"prompt": "add"}), word_tokenizer(), max_prompt_tokens=9, chat_template=unknown)


def test_a_file_to_prompts(tmp_path: Path) -> None:
    source = write(tmp_path / "data.jsonl", json.dumps({"prompt": "add two", "answer": 2}) + "\n")
    (prompt,) = build_prompts(load_records(source), word_tokenizer(), max_prompt_tokens=9)
    assert (prompt.text, prompt.answer) == ("add two", 2)


def test_prompts_that_are_too_long_are_left_out_on_request(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = word_tokenizer()
    records = at({"prompt": "add"}, {"prompt": "add " * 9}, {"prompt": "add add"}, {"prompt": "add " * 100_000})
    settings: dict[str, Any] = {"max_prompt_tokens": 4, "chat_template": "never"}
    with pytest.raises(ValueError, match=r"data.jsonl:2: the prompt has 10 tokens.* or leave such lines out by --data"):
        build_prompts(records, tokenizer, **settings)
    kept = build_fitting_prompts(records, tokenizer, **settings)
    assert [(prompt.index, prompt.num_tokens) for prompt in kept] == [(0, 2), (1, 3)]
    assert "2 of 4 prompts are too long and left out, such as that of data.jsonl:2." in caplog.text
    assert len(build_fitting_prompts(Streamed(4, records.__getitem__), tokenizer, **settings)) == 2
    caplog.clear()
    assert build_fitting_prompts(records[:1], tokenizer, **settings) == kept[:1]
    assert not caplog.text
    with pytest.raises(ValueError, match="All 1 prompts are too long: none is left"):
        build_fitting_prompts(records[1:2], tokenizer, **settings)


# ---- images ------------------------------------------------------------------------------------------------------


def media_fields(**options: Any) -> MediaFields:
    return MediaFields(processor=tiny_media("qwen2_5_vl"), **options)


def image_prompts(folder: Path, *records: dict[str, Any], **options: Any) -> list[Prompt]:
    return built(write(folder / "data.jsonl", "\n".join(map(json.dumps, records))), **options)


def built(source: str, **options: Any) -> list[Prompt]:
    fields = media_fields(**options)
    assert fields.processor is not None
    tokenizer = fields.processor.processor.tokenizer
    return list(
        build_prompts(load_records(source), tokenizer, max_prompt_tokens=40, chat_template="never", media=fields)
    )


def test_a_prompt_with_images_counts_the_tokens_that_they_become(tmp_path: Path) -> None:
    checkered(56, 28).save(tmp_path / "wide.png")  # 2 x 1 features of 28 x 28 pixels
    checkered(84, 84).save(tmp_path / "large.png")  # 3 x 3
    text = f"a{IMAGE}b{IMAGE}"
    pair, single, text_only = image_prompts(
        tmp_path,
        {"prompt": text, "images": ["wide.png", str(tmp_path / "large.png")], "answer": "x"},
        {"prompt": f"a{IMAGE}", "images": "wide.png"},
        {"prompt": "a", "images": None},
    )
    assert pair.images == (str(tmp_path / "wide.png"), str(tmp_path / "large.png"))
    assert (len(pair.token_ids), pair.num_tokens) == (8, 8 - 2 + 2 + 9)
    assert (single.images, single.num_tokens) == ((str(tmp_path / "wide.png"),), 1 + 2 + 2)
    assert (text_only.images, text_only.num_tokens) == ((), 1)
    assert pair.fields == {"images": ["wide.png", str(tmp_path / "large.png")]}
    assert len(pickle.dumps(pair)) < 2000  # paths travel between ranks, never pixels


@pytest.mark.parametrize("source", ["{0}/a/x.jsonl + {0}/b/x.jsonl*2", "{0}/*/x.jsonl"])
def test_images_are_searched_in_the_folder_of_each_file(tmp_path: Path, source: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        checkered(28, 28).save(tmp_path / name / f"{name}.png")
        write(tmp_path / name / "x.jsonl", json.dumps({"prompt": IMAGE, "images": f"{name}.png"}))
    images = {prompt.images for prompt in built(source.format(tmp_path))}
    assert images == {(str(tmp_path / "a" / "a.png"),), (str(tmp_path / "b" / "b.png"),)}


def test_videos_and_other_field_names(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", frames(3, 56, 28))
    (prompt,) = image_prompts(
        tmp_path, {"prompt": VIDEO, "clip": "v.npy", "images": "not read"}, image_field="", video_field="clip"
    )
    assert prompt.videos == (str(tmp_path / "v.npy"),)
    assert prompt.num_tokens == 2 + 2 * 2  # two pairs of frames


def test_messages_name_their_images_as_parts(tmp_path: Path) -> None:
    checkered(28, 28).save(tmp_path / "a.png")
    fields = media_fields()
    assert fields.processor is not None
    record = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "name": None, "content": [{"type": "image"}, {"type": "text", "text": "which?"}]},
        ],
        "images": [str(tmp_path / "a.png")],
    }
    (prompt,) = build_prompts(at(record), fields.processor.processor.tokenizer, max_prompt_tokens=99, media=fields)
    assert prompt.text == f"system:s;user:{IMAGE}which?;assistant:"
    assert prompt.token_ids.count(fields.processor.image_token_id) == 1
    assert "name" not in prompt.messages[1]


@pytest.mark.parametrize("form", ["text", "messages", "parts"])
def test_a_text_may_name_the_places_of_its_images(form: str, tmp_path: Path) -> None:
    """As in many data sets on the hub; without images the word is a word."""
    checkered(28, 28).save(tmp_path / "a.png")
    np.save(tmp_path / "v.npy", frames(2, 28, 28))
    texts, fields = ["is <image> or <image> in <video>?", "what is <image>?"], media_fields()

    def content(text: str) -> Any:
        return text if form == "messages" else [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]

    records = [
        {"prompt": text if form == "text" else [{"role": "user", "content": content(text)}], **given}
        for text, given in zip(
            texts,
            ({"images": [str(tmp_path / "a.png")] * 2, "videos": [str(tmp_path / "v.npy")]}, {"images": []}),
            strict=True,
        )
    ]
    assert fields.processor is not None
    tokenizer = fields.processor.processor.tokenizer
    shown, plain = build_prompts(at(*records), tokenizer, max_prompt_tokens=99, media=fields)
    assert shown.text == f"user:is {IMAGE} or {IMAGE} in {VIDEO}?;assistant:"
    assert plain.text == "user:what is <image>?;assistant:"
    assert shown.messages == ({"role": "user", "content": content(texts[0]) if form == "parts" else texts[0]},)


def test_bad_images_are_told_with_file_and_line(tmp_path: Path) -> None:
    checkered(28, 28).save(tmp_path / "a.png")
    checkered(280, 280).save(tmp_path / "large.png")
    (tmp_path / "text.png").write_text("no image")
    good = {"prompt": IMAGE, "images": "a.png"}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": IMAGE, "images": "none.png"}, r"data.jsonl:2: there is no image .*none.png"),
        ({"prompt": IMAGE, "images": ["text.png"]}, r"data.jsonl:2: the image .*text.png cannot be read"),
        ({"prompt": "a", "images": "a.png"}, r"data.jsonl:2: the prompt has 0 image placeholder\(s\)"),
        ({"prompt": IMAGE}, r"data.jsonl:2: the prompt has 1 image placeholder\(s\) .* and 0 image\(s\)"),
        ({"prompt": IMAGE, "images": [1]}, r"data.jsonl:2: 'images' is \[1\]: it must be a path or a list of paths"),
        ({"prompt": "a" * 36 + IMAGE, "images": "a.png"}, ""),
        (
            {"prompt": "a" * 36 + IMAGE, "images": "large.png"},
            "data.jsonl:2: the prompt has 47 tokens, and there is room",
        ),
    ]
    for record, message in cases:
        if not message:
            assert len(image_prompts(tmp_path, good, record)) == 2
            continue
        with pytest.raises(ValueError, match=message):
            image_prompts(tmp_path, good, record)
    parts = {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}
    with pytest.raises(ValueError, match=r"data.jsonl:1: messages\[0\]: the part .*audio.* must be"):
        image_prompts(tmp_path, parts)


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(TEMPLATE)
    with pytest.raises(ValueError, match="data.jsonl:1: 'images' names images, and the model takes none"):
        build_prompts(at({"prompt": "add", "images": "a.png"}), tokenizer, max_prompt_tokens=9, media=MediaFields())
    record = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    with pytest.raises(ValueError, match=r"messages\[0\] has an image .* where only text is taken"):
        build_prompts(at(record), tokenizer, max_prompt_tokens=9)
    parts = [{"type": "text", "text": "ad"}, {"type": "text", "text": "d", "image": None}]
    (joined,) = build_prompts(
        at({"messages": [{"role": "user", "content": parts}]}), tokenizer, max_prompt_tokens=9, media=MediaFields()
    )
    assert joined.messages == ({"role": "user", "content": "add"},)
    (prompt,) = build_prompts(at({"prompt": "add", "images": []}), tokenizer, max_prompt_tokens=9, media=MediaFields())
    assert prompt.images == ()


def test_a_workflow_that_loses_the_records_is_told() -> None:
    lost: Any = None
    with pytest.raises(ValueError, match=r"with_tools\(\) of the workflow returned None"):
        build_prompts(lost, lost, max_prompt_tokens=1)
