from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightrl.config import GRPOConfig, SFTConfig, parse_config, template_arguments
from lightrl.data.chat_arguments import (
    set_template_arguments,
    set_template_file,
    uses_template,
    warn_of_date,
    warn_of_written_messages,
)
from lightrl.data.prompts import build_prompts

TEMPLATE = (
    "{% if not (thinking is defined and thinking is false) %}think {% endif %}{{ style | default('plain') }} "
    "{% for message in messages %}{{ message['content'] }} {% endfor %}"
)


def tokenizer(template: str | dict[str, str] | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<unk>", "think", "plain", "short", "hello"])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", chat_template=template)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({}, "think plain hello "), ({"thinking": False}, "plain hello "), ({"style": "short"}, "think short hello ")],
)
def test_prompts_are_rendered_with_the_arguments(arguments: dict[str, object], text: str) -> None:
    renderer = tokenizer()
    set_template_arguments(renderer, arguments)  # without any, the template's defaults
    (prompt,) = build_prompts([({"prompt": "hello"}, "here")], renderer, max_prompt_tokens=9)
    assert prompt.text == text
    named = tokenizer({"default": TEMPLATE})
    set_template_arguments(named, arguments)
    assert named.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == text


def test_the_template_of_a_file_takes_the_place_of_the_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% for m in messages %}short {{ m.content }}{% endfor %}")
    renderer = tokenizer()
    set_template_file(renderer, str(tmp_path / "own.jinja"))
    (prompt,) = build_prompts([({"prompt": "hello"}, "here")], renderer, max_prompt_tokens=9)
    assert prompt.text == "short hello"
    renderer.save_pretrained(tmp_path / "saved")
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "saved").chat_template == renderer.chat_template
    (tmp_path / "broken.jinja").write_text("hello\n{% for m in messages %}")
    (tmp_path / "empty.jinja").write_text(" ")
    for name, told in (("broken", "line 2: this is no Jinja"), ("empty", "it is empty"), ("none", "there is no such")):
        with pytest.raises(ValueError, match=f"--data.chat_template_file .*{name}.jinja.*{told}"):
            set_template_file(renderer, str(tmp_path / f"{name}.jinja"))
    (tmp_path / "picky.jinja").write_text("{{ raise_exception('no question') }}")
    set_template_file(renderer, str(tmp_path / "picky.jinja"))  # the error about a record will name it


@pytest.mark.parametrize("name", ["think_more", "messages", "tools"])
def test_a_variable_that_would_change_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"reads no variable '{name}' of yours. It has thinking among its optional"):
        set_template_arguments(tokenizer(), {name: True})
    with pytest.raises(ValueError, match="has no chat template"):
        set_template_arguments(tokenizer(None), {name: True})


def test_messages_are_rendered_whatever_the_option_says() -> None:
    text, turns = {"prompt": "hello", "tools": ["f"]}, {"chosen": [{"role": "user", "content": "hello"}]}
    assert not uses_template("never", [])
    assert [uses_template("never", [(record, "here")]) for record in (text, turns)] == [False, True]
    assert uses_template("auto", [(text, "here")])


def test_a_template_that_writes_todays_date_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """As those of Llama 3.2 and Mistral Small do: a run that goes on tomorrow would have other prompts."""
    fixed = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b') %}{% endif %}{{ date_string }}"
    )
    warn_of_date(tokenizer(fixed), {})
    assert "depend on the day" in caplog.text
    assert "--data.chat_template_args date_string='26 Jul 2024'" in caplog.text
    caplog.clear()
    warn_of_date(tokenizer("{{ strftime_now('%Y') }}"), {})
    assert caplog.text.rstrip().endswith("continued on another.")
    caplog.clear()
    for renderer, given in ((tokenizer(fixed), {"date_string": "1 May"}), (tokenizer(), {}), (tokenizer(None), {})):
        warn_of_date(renderer, given)
    assert not caplog.text


@pytest.mark.parametrize("kind", [GRPOConfig, SFTConfig])
def test_the_option_is_read_and_checked(kind: type[GRPOConfig], capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(kind, ["--data.chat_template_args", "enable_thinking=false", "n=3"])
    assert template_arguments(config.data) == {"enable_thinking": False, "n": 3}
    with pytest.raises(SystemExit):
        parse_config(kind, ["--data.chat_template_args", "enable_thinking"])
    assert "'enable_thinking': it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"prompt": '[{"role": "user", "content": "1+1="}]'}, "prompt"),
        ({"prompt": "[{'content': '1+1=', 'role': 'user'}]"}, "prompt"),
        ({"prompt": None, "messages": '[\n  {"role":"user"}]'}, "messages"),
        ({"prompt": [{"role": "user", "content": "[{'role': 'user'}]"}]}, ""),
        ({"prompt": "What is the role in [{'role': 'user'}]?"}, ""),
        ({"prompt": "[{'name': 'x'}] has no role:"}, ""),
        ({"prompt": "[1, 2]"}, ""),
        ({"answer": "1"}, ""),
    ],
)
def test_messages_that_are_written_as_a_text_are_warned_of(
    record: dict[str, object], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_written_messages([(record, "data.csv: row 1")], "prompt")
    warned = [f"data.csv: row 1: {field!r} is the text of a list of messages"] if field else []
    assert [message.partition(", and becomes")[0] for message in caplog.messages] == warned
