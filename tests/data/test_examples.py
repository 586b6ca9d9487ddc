"""Records to examples: what is trained, letter by letter, and what is refused, with file and line."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import AddedToken, PreTrainedTokenizerFast

import lightrl.data.examples
from lightrl.builtin.model import builtin_tokenizer
from lightrl.data.examples import ExampleBuilder, ExampleFields, keep_fitting
from lightrl.data.prompts import load_records
from lightrl.records import Answer, Example

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
# As reasoning models do: only the last assistant turn keeps the tag.
FORGETFUL = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}#{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
BARE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"


def letters(chat_template: str | None = None, merges: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A token for each letter, but one for each text in `merges`; every text begins with <s>."""
    signs = [*merges, *map(chr, range(32, 127)), "\n"]
    vocabulary = {sign: place for place, sign in enumerate(["<unk>", "<s>", "</s>", *signs])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    pattern = "|".join([*merges, r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )
    fast.add_special_tokens({"additional_special_tokens": [AddedToken("<|start|>"), AddedToken("<|end|>")]})
    return fast


def read(answer: Answer, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text with the trained tokens in [brackets]."""
    text = "".join(tokenizer.convert_ids_to_tokens(list(answer.prompt_ids)))
    is_open = False
    for token, trained in zip(answer.response_ids, answer.loss_mask, strict=True):
        if trained is not is_open:
            text += "[" if trained else "]"
            is_open = trained
        text += tokenizer.convert_ids_to_tokens(token)
    return text + ("]" if is_open else "")


def at(*records: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    return [(record, f"data.jsonl:{line}") for line, record in enumerate(records, start=1)]


def build(record: dict[str, Any], tokenizer: PreTrainedTokenizerFast, **settings: Any) -> str:
    builder = ExampleBuilder(tokenizer, ExampleFields(), **settings)
    (example,) = builder.responses(at(record))
    return read(example.answers[0], tokenizer)


def build_pair(record: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    (example,) = ExampleBuilder(tokenizer, ExampleFields()).pairs(at(record))
    return [read(answer, tokenizer) for answer in example.answers]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_strings_without_a_template_get_one_start_and_one_end() -> None:
    assert build({"prompt": "1+1=", "response": "2"}, letters()) == "<s>1+1=[2</s>]"


def test_a_response_is_tokenised_with_its_prompt_unless_a_token_would_cross() -> None:
    assert build({"prompt": "a", "response": "bc"}, letters(merges=("bc",))) == "<s>a[bc</s>]"
    answer = ExampleBuilder(letters(merges=("ab",)), ExampleFields()).responses(at({"prompt": "a", "response": "bc"}))
    assert len(answer[0].answers[0].prompt_ids) == 2  # <s> and a: what a model that answers the prompt is given
    assert build({"prompt": "a", "response": "bc"}, letters(merges=("ab",))) == "<s>a[bc</s>]"


def test_strings_with_a_template_become_a_turn_of_each() -> None:
    wanted = "<|start|>user\nhi<|end|>\n<|start|>assistant\n[yo<|end|>]"
    assert build({"prompt": "hi", "response": "yo"}, letters(CHATML)) == wanted
    assert build({"prompt": [user("hi")], "response": "yo"}, letters(CHATML)) == wanted
    assert build({"prompt": "hi", "response": "yo"}, letters(CHATML), chat_template="never") == "<s>hi[yo</s>]"


def test_only_assistant_turns_are_trained_all_or_the_last() -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    head = "<|start|>user\na<|end|>\n<|start|>assistant\n"
    middle = "\n<|start|>user\nc<|end|>\n<|start|>assistant\n"
    assert build({"messages": messages}, letters(CHATML)) == f"{head}[b<|end|>]{middle}[d<|end|>]"
    last = build({"messages": messages}, letters(CHATML), train_on="last")
    assert last == f"{head}b<|end|>{middle}[d<|end|>]"


MARKS = [{"weight": 0}, {"loss": 0.0}, {"loss_mask": 0}, {"step_loss_mask": 0}]
MARKS += [{"train": False}, {"training": False}, {"trainable": False}]


@pytest.mark.parametrize("mark", MARKS)
def test_a_message_with_the_weight_0_is_given_and_not_trained(mark: dict[str, Any]) -> None:
    trained = [{"weight": 1}, {"train": True}, {"loss": None}, {"loss_mask": 1}]
    messages = [user("a"), {**assistant("b"), **mark}, user("c"), {**assistant("d"), **trained[0]}]
    head = "<|start|>user\na<|end|>\n<|start|>assistant\nb<|end|>\n<|start|>user\nc<|end|>\n<|start|>assistant\n"
    assert build({"messages": messages}, letters(CHATML)) == f"{head}[d<|end|>]"
    for other in trained:
        whole = build({"messages": [user("a"), {**assistant("b"), **other}]}, letters(CHATML))
        assert whole.endswith("[b<|end|>]")
    bad = [user("a"), {**assistant("b"), **mark}]
    assert build({"messages": [*messages[:2], user("c"), assistant("d"), *bad]}, letters(CHATML)) == f"{head}[d<|end|>]"
    with pytest.raises(ValueError, match="data.jsonl:1: every message of the assistant has the weight 0"):
        build({"messages": bad}, letters(CHATML))
    assert build({"messages": bad}, letters(CHATML), train_on="last").endswith("[b<|end|>]")


def test_a_turn_that_the_next_one_ends_learns_its_first_token() -> None:
    """As with GLM, which stops at <|user|> and <|observation|>."""
    glm = (
        "{% for m in messages %}<|{{ 'start' if m.role == 'assistant' else 'end' }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>{% endif %}"
    )
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert build({"messages": messages}, letters(glm)) == "<|end|>a<|start|>[b<|end|>]c<|start|>[d</s>]"
    assert build({"messages": messages}, letters(glm), train_on="last") == "<|end|>a<|start|>b<|end|>c<|start|>[d</s>]"
    spaced = glm.replace("<|", " <|")  # what the template writes behind the turn is not the model's
    assert "[b] <|end|>c" in build({"messages": messages}, letters(spaced))


def test_a_template_without_an_end_of_turn_gets_the_end_token() -> None:
    assert build({"messages": [user("a"), assistant("b")]}, letters(BARE)) == "u:a\na:[b</s>]"


def test_a_template_that_rewrites_earlier_turns_is_told() -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    with pytest.raises(ValueError, match="data.jsonl:1: the chat template renders the assistant's turn 1 otherwise"):
        build({"messages": messages}, letters(FORGETFUL))
    assert build({"messages": messages}, letters(FORGETFUL), train_on="last").endswith("assistant\n[#d<|end|>]")


def test_a_template_that_ends_the_whole_conversation_with_the_end_token_is_read() -> None:
    """As those of Phi-3 and Phi-4-mini."""
    end = "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    phi = CHATML + end
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    head, middle = "<|start|>user\na<|end|>\n<|start|>assistant\n", "\n<|start|>user\nc<|end|>\n<|start|>assistant\n"
    assert build({"messages": messages}, letters(phi)) == f"{head}[b<|end|>]{middle}[d<|end|>\n</s>]"
    last = build({"messages": messages}, letters(phi), train_on="last")
    assert last == f"{head}b<|end|>{middle}[d<|end|>\n</s>]"
    with pytest.raises(ValueError, match="data.jsonl:1: the chat template renders the assistant's turn 1 otherwise"):
        build({"messages": messages}, letters(FORGETFUL + end))
    harmony = CHATML.replace("<|end|>", "{% if loop.last and m.role == 'assistant' %}</s>{% else %}<|end|>{% endif %}")
    with pytest.raises(ValueError, match="data.jsonl:1: the chat template renders the assistant's turn 1 otherwise"):
        build({"messages": messages}, letters(harmony))


def test_a_template_whose_generation_prompt_begins_no_turn_is_told() -> None:
    thinking = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    text = r"data.jsonl:1: the chat template does not begin the assistant's turn 1 .* '<\|start\|>assistant\\n<think>'"
    with pytest.raises(ValueError, match=text):
        build_pair({"prompt": "a", "chosen": "b", "rejected": "c"}, letters(thinking))
    thought = {"prompt": "a", "chosen": "<think>b", "rejected": "<think>c"}
    assert build_pair(thought, letters(thinking))[0].endswith("assistant\n<think>[b<|end|>]")


def test_pairs_share_their_prompt_in_every_form() -> None:
    tokenizer = letters(CHATML)
    head = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    wanted = [f"{head}[yes<|end|>]", f"{head}[no<|end|>]"]
    forms: list[dict[str, Any]] = [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": [user("hi")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {"chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]},
        {"prompt": "hi", "chosen": [user("hi"), assistant("yes")], "rejected": [user("hi"), assistant("no")]},
    ]
    for record in forms:
        assert build_pair(record, tokenizer) == wanted
    assert build_pair(forms[0], letters()) == ["<s>hi[yes</s>]", "<s>hi[no</s>]"]


def test_pairs_may_have_a_margin() -> None:
    builder = ExampleBuilder(letters(), ExampleFields(margin="gap"))
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    found = builder.pairs(at(pair, {**pair, "gap": 2}, {**pair, "gap": None}))
    assert [example.margin for example in found] == [0.0, 2.0, 0.0]
    inner = ExampleBuilder(letters(), ExampleFields(margin="gaps.whole"))
    assert inner.pairs(at({**pair, "gaps": {"whole": 3}}))[0].margin == 3
    with pytest.raises(ValueError, match="data.jsonl:1: the margin is 'wide'"):
        builder.pairs(at({**pair, "gap": "wide"}))
    with pytest.raises(ValueError, match="the margin is nan"):
        builder.pairs(at({**pair, "gap": float("nan")}))
    assert ExampleBuilder(letters(), ExampleFields()).pairs(at({**pair, "margin": "wide"}))[0].margin == 0  # as in DPO


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "a"}, "neither 'response' nor 'messages', only ['prompt']"),
        ({"response": "a"}, "the record has no 'prompt'"),
        ({"prompt": "a", "response": 3}, "'response' is of type int"),
        ({"prompt": "a", "response": " "}, "'response' is empty"),
        ({"messages": [user("a"), assistant("")]}, "an answer is empty"),
        ({"messages": []}, "'messages' must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "messages[0] is {'role': 'user'}"),
        ({"messages": [user("a")]}, "no message is the assistant's"),
        ({"prompt": "a", "response": "b", "images": ["x.png"]}, "'images' names images, and the model takes none"),
    ],
)
def test_a_bad_record_is_told_with_its_place(record: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="^data.jsonl:1: ") as error:
        build(record, letters(CHATML))
    assert text in str(error.value)


def test_messages_need_a_template() -> None:
    with pytest.raises(ValueError, match="data.jsonl:1: messages are rendered by a chat template"):
        build({"messages": [user("a"), assistant("b")]}, letters())


def test_a_pair_needs_both_answers() -> None:
    with pytest.raises(ValueError, match="data.jsonl:1: the record has no 'rejected'"):
        build_pair({"prompt": "a", "chosen": "b"}, letters())


def test_too_long_examples_are_an_error_or_left_out() -> None:
    def example(*lengths: int) -> Example:
        answers = tuple(Answer(prompt_ids=(1,), response_ids=(2,) * n, loss_mask=(True,) * n) for n in lengths)
        return Example(index=0, where=f"data.jsonl:{lengths[0]}", answers=answers)

    examples = [example(1), example(2, 4), example(3)]
    assert keep_fitting(examples, max_tokens=5, too_long="error") == (examples, 0)
    assert keep_fitting(examples, max_tokens=4, too_long="skip") == ([examples[0], examples[2]], 1)
    with pytest.raises(ValueError, match="data.jsonl:2: prompt and answer have 5 tokens, and there is room for 4"):
        keep_fitting(examples, max_tokens=4, too_long="error")
    with pytest.raises(ValueError, match="All 3 examples have more than 1 tokens"):
        keep_fitting(examples, max_tokens=1, too_long="skip")


@pytest.mark.parametrize("kind", ["responses", "pairs"])
def test_lines_that_are_too_long_to_tokenise_are_left_out_like_others(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightrl.data.examples, "_MAX_CHARACTERS", 10)
    texts = ["y", "n" * 10]  # behind a prompt of one character
    records = [
        ({"prompt": "q", "response": text, "chosen": "y", "rejected": text}, f"data.jsonl:{line}")
        for line, text in enumerate(texts, start=1)
    ]
    examples = getattr(ExampleBuilder(letters(), ExampleFields()), kind)(records)
    assert keep_fitting(examples, max_tokens=50, too_long="skip") == ([examples[0]], 1)
    with pytest.raises(ValueError, match=r"^data.jsonl:2: prompt and answer have 11 characters.* --data.too_long skip"):
        keep_fitting(examples, max_tokens=50, too_long="error")


@pytest.mark.parametrize("template", [CHATML, BARE])
def test_a_conversation_to_score_ends_as_its_template_writes_it(template: str) -> None:
    """Programs that ask a reward model for a score give it this text, and its score is that of the last token."""
    tokenizer = letters(template, merges=(":x",))  # a token that spans the beginning of the answer
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    builder = ExampleBuilder(tokenizer, ExampleFields(), is_scored=True)
    (example,) = builder.pairs(at({"prompt": "q", "chosen": "x", "rejected": "y"}))
    chosen = example.answers[0]
    assert [*chosen.prompt_ids, *chosen.response_ids] == tokenizer(text, add_special_tokens=False)["input_ids"]
    raw = ExampleBuilder(tokenizer, ExampleFields(), is_scored=True, chat_template="never")
    (example,) = raw.pairs(at({"prompt": "q", "chosen": "x", "rejected": "y"}))
    assert read(example.answers[0], tokenizer) == "<s>q[x</s>]"


def test_a_thought_that_the_template_leaves_out_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    reads = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    thoughtful = [user("q"), {**assistant("x"), "reasoning_content": " so\n"}]
    for messages in (thoughtful, [user("q"), assistant("x")], [user("q"), {**assistant("x"), "thinking": ""}]):
        build({"messages": messages}, letters(reads))
    build({"messages": [user("q"), {**assistant("so x"), "thinking": "so"}]}, letters(CHATML))  # the content holds it
    assert not caplog.text
    ExampleBuilder(letters(CHATML), ExampleFields()).responses(at(*[{"messages": thoughtful}] * 2))
    assert caplog.text.count("data.jsonl:1: the chat template leaves out the 'reasoning_content' of an answer") == 1
    assert caplog.text.count("leaves out") == 1


def test_the_builtin_data_sets_become_examples() -> None:
    tokenizer = builtin_tokenizer()
    builder = ExampleBuilder(tokenizer, ExampleFields())
    answers = builder.responses(load_records("builtin:addition-answers")[:1])
    assert read(answers[0].answers[0], tokenizer) == "95+18=[113<eos>]"
    (pair,) = builder.pairs(load_records("builtin:addition-pairs-heldout")[:1])
    assert read(pair.answers[0], tokenizer) == "50+88=[138<eos>]"
    assert pair.answers[0].prompt_ids == pair.answers[1].prompt_ids


def test_a_turn_that_only_calls_a_tool_may_have_no_content() -> None:
    template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls %}#{{ c.name }}{% endfor %};"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    turns = [{"role": "user", "content": "q"}, calls, {"role": "tool", "content": "6"}]
    messages = [*turns, {"role": "assistant", "content": "x"}]
    assert build({"messages": messages}, letters(template)) == "u:q;a:[#f;]t:6;a:[x;</s>]"
    with pytest.raises(ValueError, match="A message must be"):
        build({"messages": [turns[0], {"role": "assistant", "content": None}]}, letters(template))


@pytest.mark.parametrize("call", [{"name": "f"}, {"type": "function", "function": {"name": "f", "arguments": {}}}])
def test_a_template_that_leaves_out_a_call_is_refused(call: dict[str, Any]) -> None:
    """The model would learn to end its turn in the place of the call."""
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x", "tool_calls": [call]}]
    with pytest.raises(ValueError, match=r"data.jsonl:1: the chat template leaves out the call of 'f' in .* turn 1"):
        build({"messages": turns}, letters(CHATML))
