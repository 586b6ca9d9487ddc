"""Whatever is wrong with what a run is given is told in one sentence, soon, and nothing is written.

Options, YAML and single values are in tests/config; parameters of algorithms in tests/algorithms/test_ranges.py.
"""

import dataclasses
import errno
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from lightrl.builtin.model import builtin_tokenizer
from lightrl.config import DPOConfig, GRPOConfig, PPOConfig, RMConfig, SFTConfig
from lightrl.config.command_line import _yaml_flags as read_options
from lightrl.config.options import option_types, own_fields
from lightrl.data.chat_arguments import set_template_file
from lightrl.data.examples import ExampleBuilder, ExampleFields, keep_fitting
from lightrl.data.prompts import build_prompts, load_records
from lightrl.models.critic import load_critic
from lightrl.models.option_names import naming
from lightrl.models.policy import check_model_folder, load_config, load_policy, load_tokenizer
from lightrl.models.reward_model import load_reward_model
from lightrl.models.teacher import load_teacher
from lightrl.process_group import check_environment
from lightrl.report.run_files import read_run
from lightrl.strategy import create_strategy
from lightrl.strategy.base import StrategyBase
from lightrl.testing import run_program, run_spmd
from lightrl.trainers.earlier_run import checkpoint_at, config_file
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.run import open_run
from lightrl.trainers.run_folder import OWNER_NAME, RunFolder, open_folder
from lightrl.trainers.sft import SFTTrainer

SCRIPTS = Path(__file__).parents[2] / "scripts"
Damage = Callable[[Path], object]
QUICK_S = 60.0  # only waiting for a network, or for ever, takes longer, even on a busy machine


@contextmanager
def refused(*wanted: str) -> Iterator[None]:
    """Passes if the body raises, soon, one sentence that names what is wanted."""
    started = time.monotonic()
    with pytest.raises((ValueError, TypeError, OSError)) as error:
        yield
    text = str(error.value)
    assert text.strip(), repr(error.value)
    assert "\n" not in text.strip(), text
    assert len(text) < 2000, text
    assert all(part in text for part in wanted), text
    assert time.monotonic() - started < QUICK_S


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.lstat().st_size for path in sorted(folder.rglob("*"))}


# ---- Options ---------------------------------------------------------------------------------------------------------

KINDS = (GRPOConfig, PPOConfig, SFTConfig, RMConfig, DPOConfig)
UNUSABLE: dict[Any, tuple[Any, ...]] = {
    float: (math.nan, math.inf, -math.inf, "1"),
    float | None: (math.nan, math.inf, "1"),
    int: (10**30, -(10**30), 1.5, "1"),
    bool: ("maybe",),
    str: ("a\udc80", "a\0", 3),
    tuple[str, ...]: (("a\udc80",), (3,)),
    tuple[float, float]: ((math.nan, 0.9), (0.9,), (0.1, 1.0)),
}


def with_option(kind: type[Any], name: str, value: object) -> Any:
    head, _, rest = name.partition(".")
    return kind(**{head: with_option(own_fields(kind)[head][1], rest, value) if rest else value})


@pytest.mark.parametrize("kind", KINDS)
def test_no_option_takes_a_value_that_no_run_can_use(kind: type[Any]) -> None:
    cases = [(name, value) for name, hint in option_types(kind).items() for value in UNUSABLE.get(hint, ())]
    assert len(cases) > 120
    for name, value in cases:
        with refused(name.rpartition(".")[2]):
            with_option(kind, name, value)


# ---- Data ------------------------------------------------------------------------------------------------------------

DEEP = "[" * 100_000 + "]" * 100_000
PROMPT_LINES: dict[str, tuple[str | bytes, str]] = {
    "no object": ("5", "a record is of type int"),
    "null": ("null", "a record is of type NoneType"),
    "a list": ("[]", "a record is of type list"),
    "cut": ('{"prompt": "1', "not valid JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8 text"),
    "UTF-16": ('{"prompt": "1"}'.encode("utf-16"), "not UTF-8 text"),
    "a raw NUL": (b'{"prompt": "1\x002"}', "not valid JSON"),
    "100,000 nested lists": (DEEP, "nested too deeply"),
    "nested in a field": (f'{{"prompt": "1", "answer": {DEEP}}}', "nested too deeply"),
    "5,000 digits": ('{"prompt": "1", "answer": ' + "1" * 5000 + "}", "not valid JSON"),
    "a lone surrogate in the prompt": (r'{"prompt": "1\ud800"}', "half of a pair of surrogates"),
    "a lone surrogate in the answer": (r'{"prompt": "1", "answer": "\uDFFF"}', "half of a pair of surrogates"),
    "a lone surrogate in a name": (r'{"prompt": "1", "\uD800": 1}', "half of a pair of surrogates"),
    "an escaped NUL": (r'{"prompt": "1\u0000"}', "the tokenizer cannot read the text"),
    "letters that the tokenizer lacks": ('{"prompt": "what is it?"}', "it knows only + 0 1 2"),
    "other scripts": ('{"prompt": "\u4f60\u597d"}', "the tokenizer cannot read the text"),
    "no prompt": ('{"answer": "1"}', "has neither 'prompt' nor 'messages', only ['answer']"),
    "a null for a prompt": ('{"prompt": null, "answer": "1"}', "only ['answer', 'prompt (null)']. Name the field"),
    "an empty prompt": ('{"prompt": ""}', "'prompt' is empty"),
    "blanks": ('{"prompt": " \\n"}', "'prompt' is empty"),
    "a number": ('{"prompt": 5}', "'prompt' is of type int"),
    "a mapping": ('{"prompt": {"a": 1}}', "'prompt' is of type dict"),
    "an empty list": ('{"prompt": []}', "is an empty list"),
    "messages without a template": ('{"messages": [{"role": "user", "content": "1"}]}', "the tokenizer has none"),
    "a message that is none": ('{"messages": [5]}', "A message must be"),
    "a message without a role": ('{"messages": [{"content": "1"}]}', "A message must be"),
    "a message with a number": ('{"messages": [{"role": "user", "content": 5}]}', "A message must be"),
    "an image": ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "where only text is taken"),
    "an audio": ('{"messages": [{"role": "user", "content": [{"type": "audio"}]}]}', 'must be {"type": "text"'),
    "the assistant last": ('{"messages": [{"role": "assistant", "content": "1"}]}', "nothing left to answer"),
    "600 characters": ('{"prompt": "' + "1" * 600 + '"}', "has 600 tokens, and there is room for 100"),
    "20 MB": ('{"prompt": "' + "1" * 20_000_000 + '"}', "has 20,000,000 characters, and there is room for 100 tokens"),
}
EXAMPLE_LINES: dict[str, tuple[str, str]] = {
    "no response": ('{"prompt": "1+1="}', "has neither 'response' nor 'messages'"),
    "no prompt": ('{"response": "2"}', "has no 'prompt'"),
    "a null for a prompt": ('{"prompt": null, "response": "2"}', "only ['prompt (null)', 'response']"),
    "an empty response": ('{"prompt": "1", "response": " "}', "'response' is empty"),
    "a number": ('{"prompt": "1", "response": 2}', "'response' is of type int"),
    "an empty list": ('{"prompt": "1", "response": []}', "must be a list of messages"),
    "letters that the tokenizer lacks": ('{"prompt": "1", "response": "two"}', "the tokenizer cannot read the text"),
    "an escaped NUL": (r'{"prompt": "1", "response": "\u0000"}', "the tokenizer cannot read the text"),
    "20 MB": ('{"prompt": "1", "response": "' + "1" * 20_000_000 + '"}', "20,000,001 characters"),
    "messages without a template": ('{"messages": [{"role": "assistant", "content": "1"}]}', "the tokenizer has none"),
    "images": (
        '{"prompt": "1", "response": "2", "images": ["a.png"]}',
        "'images' names images, and the model takes none",
    ),
}
PAIR_LINES: dict[str, tuple[str, str]] = {
    "no rejected": ('{"prompt": "1", "chosen": "2"}', "has no 'rejected'"),
    "a margin that is none": ('{"prompt": "1", "chosen": "2", "rejected": "3", "margin": "x"}', "the margin is 'x'"),
    "an endless margin": ('{"prompt": "1", "chosen": "2", "rejected": "3", "margin": Infinity}', "the margin is inf"),
    "a margin of NaN": ('{"prompt": "1", "chosen": "2", "rejected": "3", "margin": NaN}', "the margin is nan"),
    "a margin beyond floats": (
        '{"prompt": "1", "chosen": "2", "rejected": "3", "margin": ' + "9" * 400 + "}",
        "the margin is 9999",
    ),
    "a list for a margin": ('{"prompt": "1", "chosen": "2", "rejected": "3", "margin": [1]}', "the margin is [1]"),
}


def written(tmp_path: Path, line: str | bytes, name: str = "data.jsonl") -> str:
    path = tmp_path / name
    path.write_bytes(b'{"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}\n')
    with path.open("ab") as file:
        file.write(line if isinstance(line, bytes) else line.encode())
    return str(path)


def read_prompts(source: str) -> None:
    build_prompts(load_records(source), builtin_tokenizer(), max_prompt_tokens=100)


@pytest.mark.parametrize("kind", list(PROMPT_LINES))
def test_a_wrong_line_of_prompts_names_its_place(kind: str, tmp_path: Path) -> None:
    line, text = PROMPT_LINES[kind]
    with refused("data.jsonl:2", text):
        read_prompts(written(tmp_path, line))


@pytest.mark.parametrize("kind", list(EXAMPLE_LINES))
def test_a_wrong_line_of_responses_names_its_place(kind: str, tmp_path: Path) -> None:
    line, text = EXAMPLE_LINES[kind]
    with refused("data.jsonl:2", text):
        examples = ExampleBuilder(builtin_tokenizer(), ExampleFields()).responses(load_records(written(tmp_path, line)))
        keep_fitting(examples, max_tokens=100, too_long="error")


@pytest.mark.parametrize("kind", list(PAIR_LINES))
def test_a_wrong_line_of_pairs_names_its_place(kind: str, tmp_path: Path) -> None:
    line, text = PAIR_LINES[kind]
    with refused("data.jsonl:2", text):
        ExampleBuilder(builtin_tokenizer(), ExampleFields(margin="margin")).pairs(load_records(written(tmp_path, line)))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("data.json", DEEP, "nested too deeply"),
        ("data.json", "[1, 2]", "row 1: a record is of type int"),
        ("data.json", '[{"prompt": "1"', "It must be an array of objects"),
        ("data.json", '[{"prompt": "\\ud800"}]', "half of a pair of surrogates"),
        ("data.parquet", "PAR1 and no more", "not a valid Parquet file"),
        ("data.parquet", "", "not a valid Parquet file"),
        ("data.txt", "1+1=", "ends in '.txt'"),
        ("empty.jsonl", "", "is empty"),
        ("blank.jsonl", "\n \n", "is empty"),
        ("folder", None, "holds no data set"),
        ("missing.jsonl", None, "There is no data set"),
    ],
)
def test_a_file_that_is_no_data_set_is_named(name: str, content: str | None, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    elif name == "folder":
        path.mkdir()
    with refused(name, text):
        read_prompts(str(path))


@pytest.mark.parametrize("source", ["builtin:nothing", "hf:", "hf:a/b/c/d", "", "\0"])
def test_a_source_that_is_none_is_named(source: str) -> None:
    with refused():
        read_prompts(source)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(alphabet="1+= a\0\ud800\u4f60", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = ["prompt", "messages", "answer", "response", "chosen", "rejected", "margin", "images"]


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=5).map(json.dumps) | st.binary(max_size=30))
def test_any_line_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, line: str | bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    tokenizer = builtin_tokenizer()
    builder = ExampleBuilder(tokenizer, ExampleFields(margin="margin"))
    for build in (lambda found: build_prompts(found, tokenizer, max_prompt_tokens=9), builder.responses, builder.pairs):
        try:
            build(load_records(written(folder, line, "any.jsonl")))
        except ValueError as error:
            assert "any.jsonl" in str(error)  # noqa: PT017


# ---- Models ----------------------------------------------------------------------------------------------------------


def config_with(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def file_with(name: str, content: str | bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:500])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"weights": StrategyBase}, folder / "pytorch_model.bin")


MODELS: dict[str, tuple[Damage, str]] = {
    "no hidden size": (config_with(hidden_size=0), ""),
    "a negative hidden size": (config_with(hidden_size=-8), ""),
    "a text for a size": (config_with(hidden_size="big"), "config"),
    "a fraction for a size": (config_with(intermediate_size=1.5), ""),
    "another hidden size": (config_with(hidden_size=64), "weights"),
    "another vocabulary": (config_with(vocab_size=5), "weights"),
    "a vocabulary of billions": (config_with(vocab_size=10**12), ""),
    "more layers than weights": (config_with(num_hidden_layers=3, layer_types=["full_attention"] * 3), "lack"),
    "no heads": (config_with(num_attention_heads=0), ""),
    "heads that do not divide": (config_with(num_key_value_heads=3), ""),
    "an unknown type": (config_with(model_type="nothing"), "nothing"),
    "no type": (config_with(model_type=None), "config"),
    "no JSON": (file_with("config.json", "{"), "config"),
    "a list": (file_with("config.json", "[]"), "config"),
    "a nested config": (file_with("config.json", DEEP), "config"),
    "an empty config": (file_with("config.json", ""), "config"),
    "a config of bytes": (file_with("config.json", b"\xff\xfe"), "config"),
    "cut weights": (cut("model.safetensors"), "weights"),
    "empty weights": (file_with("model.safetensors", ""), "weights"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights"),
    "pickled weights": (pickled, "weights"),
    "a cut tokenizer": (cut("tokenizer.json"), "tokenizer"),
    "an empty tokenizer": (file_with("tokenizer.json", "{}"), "tokenizer"),
    "a tokenizer of bytes": (file_with("tokenizer.json", b"\xff"), "tokenizer"),
    "a tokenizer config of text": (file_with("tokenizer_config.json", "no"), "tokenizer"),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("tok*")], "has no tokenizer"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "no folder": (shutil.rmtree, "there is no such folder"),
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_damaged_model_is_named(kind: str, toy: Path, tmp_path: Path) -> None:
    damage, text = MODELS[kind]
    folder = tmp_path / "model"
    shutil.copytree(toy / "model", folder)
    damage(folder)
    with refused(str(folder), text):
        check_model_folder(str(folder))
        load_config(str(folder))
        load_tokenizer(str(folder))
        load_policy(str(folder), materialize=True)


@pytest.mark.parametrize("option", ["--teacher_model", "--critic_model"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_a_damaged_model_is_named_by_its_own_option(kind: str, option: str, toy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(toy / "model", folder)
    MODELS[kind][0](folder)
    with refused(f"{option} {folder}"), naming(option):
        if option == "--teacher_model":
            load_teacher(str(folder), builtin_tokenizer(), vocab_size=99, materialize=True)
        check_model_folder(str(folder), option)
        load_tokenizer(str(folder))
        load_critic(str(folder), materialize=True, init_std=0.0, seed=0)


@pytest.mark.parametrize(
    ("kind", "option"), [(GRPOConfig, "teacher_model"), (PPOConfig, "critic_model")], ids=["teacher", "critic"]
)
def test_other_models_are_looked_for_before_the_policy_is_loaded(
    kind: Any, option: str, toy: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(toy / "model", tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"")  # an error of its own, if it were read
    missing = tmp_path / "missing"
    config = kind(model=str(model), output_dir=str(tmp_path / "run"), **{option: str(missing)})
    with refused(f"--{option} {missing}: there is no such folder"):
        open_run(config, kind="grpo")
    # Ranks that generate load neither, and may be on a machine that has neither.
    assert open_run(dataclasses.replace(config, output_dir=str(tmp_path / "other")), kind="rollout").model_path


def test_a_builtin_name_is_suggested_only_where_it_can_be_given() -> None:
    with refused("--model 'builtin:sums'", "nor builtin:addition"):
        check_model_folder("builtin:sums")
    with refused("--teacher_model 'builtin:addition' is neither a folder nor a Hugging Face name."):
        check_model_folder("builtin:addition", "--teacher_model")


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_reward_model_generates_no_text(is_tied: bool, toy: Path, tmp_path: Path) -> None:
    """With tied embeddings its files lack nothing, so only its head shows that it was trained to score."""
    folder = tmp_path / "model"
    shutil.copytree(toy / "model", folder)
    config_with(tie_word_embeddings=is_tied)(folder)
    load_reward_model(str(folder), builtin_tokenizer(), materialize=True, seed=0).hf.save_pretrained(folder)
    with refused(str(folder), "is a reward model or another classifier", "Choose a language model"):
        load_policy(str(folder), materialize=True)


def test_an_output_layer_of_its_own_needs_a_config_that_says_so(toy: Path, tmp_path: Path) -> None:
    """transformers does not tie what differs, but engines and ranks that read the config alone do."""
    folder = tmp_path / "model"
    shutil.copytree(toy / "model", folder)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, folder / "model.safetensors", {"format": "pt"})
    load_policy(str(folder), materialize=True)  # the same values twice, as many files of tied models have them
    save_file({**weights, "lm_head.weight": 2 * embedding}, folder / "model.safetensors", {"format": "pt"})
    with refused(str(folder), "says tie_word_embeddings, but its files hold lm_head.weight", "false"):
        load_policy(str(folder), materialize=True)
    config_with(tie_word_embeddings=False)(folder)
    assert len(dict(load_policy(str(folder), materialize=True).named_parameters())) == len(weights) + 1


@pytest.mark.parametrize("field", ["prompt", "response"])
def test_a_token_that_only_the_tokenizer_has_is_named(field: str, toy: Path, tmp_path: Path) -> None:
    model = shutil.copytree(toy / "model", tmp_path / "model")
    tokenizer = load_tokenizer(str(model))
    tokenizer.add_tokens(["~"])
    tokenizer.save_pretrained(model)
    rows = [{"prompt": "1+2=", "response": "3"}, {"prompt": "1+2=", "response": "3", field: "1~2"}]
    data = written(tmp_path, "\n".join(map(json.dumps, rows)))
    paths: dict[str, Any] = {"model": str(model), "train_data": data, "output_dir": str(tmp_path / "run")}
    makers = [lambda: SFTTrainer(SFTConfig(**paths))]
    if field == "prompt":
        makers.append(lambda: GRPOTrainer(GRPOConfig(**paths, reward=("exact_match",))))
    for make in makers:
        with refused("data.jsonl:3", "the token '~' of id 14, and the model's ids end at 13"):
            make()


def test_a_config_without_the_number_of_tokens_is_told(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config of a model's own code may call it by another name."""
    config = PreTrainedConfig(**load_config(str(toy / "model")).to_dict() | {"vocab_size": None})
    monkeypatch.setattr("lightrl.trainers.run.load_config", lambda *_, **__: config)
    with refused("states no vocab_size"):
        SFTTrainer(SFTConfig(model=str(toy / "model"), output_dir=str(tmp_path / "run")))


@pytest.mark.parametrize("name", ["", "a:b", "/nowhere", "./nowhere", "a b/c", "a/b/c"])
def test_a_name_that_is_no_model_is_told(name: str) -> None:
    with refused(name):
        check_model_folder(name)


# ---- The run's folder ------------------------------------------------------------------------------------------------


def a_run(folder: Path) -> Path:
    run = RunFolder(folder / "run")
    run.open(GRPOConfig(), 0)
    for step in range(3):
        run.append_metrics(step, {"loss": 1.0})
    return run.root


def in_run(name: str, content: str | bytes) -> Damage:
    def damage(folder: Path) -> Path:
        root = a_run(folder)
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return root

    return damage


def below_a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file" / "run"


def a_file(folder: Path) -> Path:
    (folder / "file").write_text("")
    return folder / "file"


def a_link(folder: Path, target: str = "nowhere") -> Path:
    (folder / "link").symlink_to(target)
    return folder / "link"


def another_folder(folder: Path) -> Path:
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("")
    return folder / "mine"


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file": (a_file, "is a file"),
    "below a file": (below_a_file, "is below the file"),
    "below a device": (lambda _: Path("/dev/null/run"), "is below the file /dev/null"),
    "where nothing can be made": (lambda _: Path("/proc/run"), "/proc takes no files"),
    "a name that is too long": (
        lambda folder: folder / ("x" * 300),
        "cannot be used: File name too long. Name",
    ),
    "a link that leads nowhere": (a_link, "it is a broken symbolic link to nowhere. Name another folder."),
    "below such a link": (
        lambda folder: a_link(folder) / "run",
        "/link is a broken symbolic link to nowhere.",
    ),
    "a link to itself": (
        lambda folder: a_link(folder, "link") / "run",
        "/link is a broken symbolic link to link.",
    ),
    "another folder": (another_folder, "is no run of lightrl"),
    "no config": (in_run("config.yaml", ""), "is damaged"),
    "a config that is none": (in_run("config.yaml", "[1]"), "is damaged"),
    "a nested config": (in_run("config.yaml", "[" * 5000), "is damaged"),
    "a config of bytes": (in_run("config.yaml", b"\xff\xfe\x00"), "is damaged"),
    "a config with numbers for names": (in_run("config.yaml", "5: 6"), "is damaged"),
    "another run": (in_run("config.yaml", "lr: 5.0"), "lr was 5.0, now 0.0001"),
    "another seed": (in_run("config.yaml", "seed: 5"), "seed was 5, now 0"),
    "metrics of bytes": (in_run("metrics.jsonl", b"\xff\xfe\n\x00\n"), "line 1 is no row of a step"),
    "metrics without a step": (in_run("metrics.jsonl", '{"step": 1}\n{"loss": 2}\n{"step": 2}\n'), "line 2 is no row"),
    "metrics of lists": (in_run("metrics.jsonl", "[1]\n[2]\n"), "line 1 is no row"),
    "nested metrics": (in_run("metrics.jsonl", f"{DEEP}\n{{}}\n"), "line 1 is no row"),
    "metrics with a text for a step": (in_run("metrics.jsonl", '{"step": "1"}\n{}\n'), "line 1 is no row"),
    "samples of bytes": (in_run("samples.jsonl", b"\xff\n\xff\n"), "samples.jsonl is damaged"),
    "no marker": (in_run("checkpoints/step-000001/state.pt", "x"), "no checkpoint there is complete"),
    "an empty marker": (in_run("checkpoints/step-000001/COMPLETE", ""), "no checkpoint there is complete"),
    "a marker of bytes": (in_run("checkpoints/step-000001/COMPLETE", b"\xff"), "no checkpoint there is complete"),
    "a list for a marker": (in_run("checkpoints/step-000001/COMPLETE", "[]"), "no checkpoint there is complete"),
    "a nested marker": (in_run("checkpoints/step-000001/COMPLETE", DEEP), "no checkpoint there is complete"),
    "another step's marker": (
        in_run("checkpoints/step-000001/COMPLETE", '{"step": 2, "serial": 1, "is_latest": true, "files": {}}'),
        "no checkpoint there is complete",
    ),
    "an endless step": (
        in_run("checkpoints/step-000001/COMPLETE", '{"step": Infinity, "serial": 1, "is_latest": true, "files": {}}'),
        "no checkpoint there is complete",
    ),
    "a missing file": (
        in_run("checkpoints/step-000001/COMPLETE", '{"step": 1, "serial": 1, "is_latest": true, "files": {"a": 1}}'),
        "no checkpoint there is complete",
    ),
}


@pytest.mark.parametrize("kind", list(FOLDERS))
def test_a_folder_that_cannot_hold_the_run_is_named_and_left_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, text = FOLDERS[kind]
    root = make(tmp_path)
    before = snapshot(tmp_path)
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    with refused(text):
        open_folder(GRPOConfig(output_dir=str(root)), "grpo", strategy.comm)
    assert snapshot(tmp_path) == before


def test_a_read_only_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, _mode: int = 0) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    monkeypatch.setattr(os, "mkdir", refuse)  # root may write everywhere
    with refused(f"--output_dir {tmp_path}/a/b cannot be used: {tmp_path} takes no files (Read-only file system)."):
        open_folder(GRPOConfig(output_dir=str(tmp_path / "a" / "b")), "grpo", strategy.comm)


def test_a_file_of_another_user_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, opened = a_run(tmp_path), os.open

    def refuse(path: Any, *args: Any) -> int:
        if Path(path).name == OWNER_NAME:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args)

    (root / OWNER_NAME).write_text("{}")
    strategy = create_strategy(GRPOConfig(strategy="single"))
    strategy.setup_distributed()
    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    with refused(f"{root}/{OWNER_NAME} there is not for this user (Permission denied). Name another folder."):
        open_folder(GRPOConfig(output_dir=str(root)), "grpo", strategy.comm)


LONG = "x" * 300
READERS: dict[str, tuple[Callable[[str], Any], str]] = {  # what reads a path, and what it says of one that is too long
    "config": (lambda name: read_options(GRPOConfig, name), "--config {}: File name too long."),
    "data": (load_records, "{}: File name too long. A data set is a .jsonl"),
    "model": (lambda name: check_model_folder(f"./{name}"), "--model ./{}: File name too long."),
    "resume": (lambda name: checkpoint_at(Path(name), Path()), "--resume {}: File name too long. Give auto, never,"),
    "template": (lambda name: set_template_file(None, name), "--data.chat_template_file {}: File name too long."),
    "report": (lambda name: read_run(Path(name)), "{}: File name too long."),
    "export": (lambda name: config_file(Path(name)), "{} is no folder of a run"),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_is_too_long_is_told_with_its_option(reader: str) -> None:
    read, text = READERS[reader]
    with refused(text.format(LONG)):
        read(LONG)


# ---- The world -------------------------------------------------------------------------------------------------------

WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        *(({name: None}, f"missing for a distributed run: {name}") for name in WORLD if name != "LOCAL_RANK"),
        *(({name: "x"}, f"{name} is 'x'") for name in WORLD if name != "MASTER_ADDR"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"RANK": "1.0"}, "RANK is '1.0'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is ''"),
        ({"RANK": "2"}, "RANK is 2: with WORLD_SIZE 2 it must be 0 to 1"),
        ({"WORLD_SIZE": "0"}, "RANK is 0: with WORLD_SIZE 0"),
    ],
)
def test_a_world_that_is_none_is_told(
    changes: dict[str, str | None], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**WORLD, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with refused(text):
        check_environment()


def test_there_are_two_hundred_cases() -> None:
    tables = (PROMPT_LINES, EXAMPLE_LINES, PAIR_LINES, MODELS, FOLDERS)
    options = sum(len(UNUSABLE.get(hint, ())) for hint in option_types(GRPOConfig).values())
    assert sum(map(len, tables)) >= 100
    assert options + sum(map(len, tables)) >= 200
    assert dataclasses.is_dataclass(GRPOConfig)


# ---- Programs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_rank_says_so_and_writes_nothing(toy_flags: list[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1\\ud800"}\n')
    before = snapshot(tmp_path)
    for program, wrong, world, text in (
        ("train_grpo.py", ["--train_data", str(bad)], 2, "half of a pair of surrogates"),
        ("train_ppo.py", ["--algorithm.advantage_args", "gamma=2"], 0, "gamma is 2, and it must be between 0 and 1"),
    ):
        command = [*toy_flags, *wrong]
        script = str(SCRIPTS / program)
        if world:
            folder = ["--output_dir", str(tmp_path / "run")]
            output = run_spmd(script, *command, *folder, world_size=world, timeout_s=120, expect_failure=True)
        else:  # the folder would be a new one under runs/
            output = run_program([sys.executable, script, *command], timeout_s=120, cwd=tmp_path, expect_failure=True)
        assert "error: " in output, output
        assert text in output
        assert "Traceback" not in output
    assert snapshot(tmp_path) == before
