import json
import logging
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, MistralConfig

from lightrl.models.policy import load_tokenizer

TEXT = "Hello world. I'm 27, isn't it? In 2023: 650841823 + 2024"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
THREE_DIGITS = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
CUTS = {
    "bytes": BYTES,
    "digits": pre_tokenizers.Sequence(
        [THREE_DIGITS, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    ),
}


def save(folder: Path, backend: Tokenizer, kind: str, **settings: str | bool) -> str:
    """Saves a tokenizer of a Llama, which is to be loaded by a class."""
    backend.save(str(folder / "tokenizer.json"))
    LlamaConfig().save_pretrained(folder)
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def byte_level(cut: pre_tokenizers.PreTokenizer) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = cut, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([TEXT] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return backend


def of_pieces() -> Tokenizer:
    """Returns a tokenizer of SentencePiece's kind, as Llama 2 has it."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=400, special_tokens=special))
    backend.pre_tokenizer = None
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return backend


@pytest.mark.parametrize(
    ("kind", "cut"), [("LlamaTokenizerFast", "bytes"), ("Qwen2Tokenizer", "digits"), ("GPT2Tokenizer", "digits")]
)
def test_text_has_the_tokens_of_the_file(kind: str, cut: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = byte_level(CUTS[cut])
    path = save(tmp_path, backend, kind, chat_template="{{ messages }}")
    wanted = backend.encode(TEXT).ids
    assert AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"] != wanted  # or this module is needed no longer
    loaded = load_tokenizer(path)
    assert loaded(TEXT)["input_ids"] == wanted
    assert loaded.decode(wanted, skip_special_tokens=True) == TEXT
    assert (loaded.bos_token, loaded.eos_token, loaded.chat_template) == ("<s>", "</s>", "{{ messages }}")
    assert f"as a {kind.removesuffix('Fast')}, which cuts text into other tokens" in caplog.text
    loaded.save_pretrained(tmp_path / "again")
    LlamaConfig().save_pretrained(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again"))(TEXT)["input_ids"] == wanted


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_that_is_as_in_its_file_stays(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = of_pieces()
    backend.enable_truncation(4)  # as tokenizers have it that were saved after a training
    backend.enable_padding(length=8)
    loaded = load_tokenizer(save(tmp_path, backend, kind, unk_token="<unk>"))
    assert type(loaded) is type(AutoTokenizer.from_pretrained(tmp_path))
    backend.no_truncation()
    backend.no_padding()
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == backend.encode(TEXT).ids
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_special_tokens_that_only_the_class_names_are_kept(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level(BYTES), "LlamaTokenizer")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    loaded = load_tokenizer(path)
    assert (loaded.bos_token, loaded.eos_token, loaded.eos_token_id) == ("<s>", "</s>", 1)
    assert loaded.unk_token is None  # the vocabulary has no <unk>
    assert loaded.decode(loaded(TEXT, add_special_tokens=False)["input_ids"]) == TEXT


def test_a_response_keeps_its_spaces(tmp_path: Path) -> None:
    text = "x != y ? [1 , 2] : it 's ."
    backend = Tokenizer(models.WordLevel(unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.train_from_iterator([text], trainers.WordLevelTrainer(special_tokens=["<unk>"]))
    loaded = load_tokenizer(save(tmp_path, backend, "PreTrainedTokenizerFast", clean_up_tokenization_spaces=True))
    assert loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]) == text


def test_a_model_of_mistrals_has_its_chat_template_beside_the_package_of_vllm(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    path = save(tmp_path, of_pieces(), "PreTrainedTokenizerFast", chat_template="{{ messages }}")
    MistralConfig().save_pretrained(path)
    (tmp_path / "tekken.json").write_text("{}")
    loaded = load_tokenizer(path)
    assert loaded.chat_template == "{{ messages }}"
    assert loaded(TEXT, add_special_tokens=False)["input_ids"] == of_pieces().encode(TEXT).ids
    loaded.save_pretrained(tmp_path / "again")
