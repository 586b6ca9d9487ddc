"""From a Hugging Face folder or name to tokenizer, context length and Policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from lightrl.models.multimodal import FAMILIES, takes_images
from lightrl.models.policy import Policy

disable_progress_bar()  # every rank would draw one; the run has its own


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def check_model_folder(path: str, option: str = "--model") -> None:
    """Says what a local folder lacks before transformers takes it for the name of a repository."""
    folder = Path(path).expanduser()
    looks_local = path.startswith(("/", ".", "~")) or folder.exists()
    if not path or (":" in path and not folder.exists()):
        raise ValueError(f"{option} {path!r} is neither a folder, nor a Hugging Face name, nor builtin:addition.")
    if not looks_local:
        return
    if not folder.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no such folder.")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{option} {path}: the folder has no config.json, so it holds no Hugging Face model.")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{option} {path}: the folder has no tokenizer. Save it there with save_pretrained().")


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    return tokenizer


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


def context_length(path: str, *, trust_remote_code: bool = False) -> int:
    """Tokens of prompt and response together that the model takes; reads its config only."""
    config = load_config(path, trust_remote_code=trust_remote_code).get_text_config()
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    return int(length) if length else 1 << 30


def load_policy(path: str, *, materialize: bool, trust_remote_code: bool = False, is_reference: bool = False) -> Policy:
    """The model in float32. materialize=False builds it on the meta device, for ranks that get its weights later."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    loader = model_loader(config)
    if materialize:
        try:
            model = loader.from_pretrained(path, dtype=torch.float32, trust_remote_code=trust_remote_code)
        except SafetensorError as error:
            raise ValueError(f"--model {path}: its weights cannot be read ({error}). Copy the files anew.") from error
    else:
        with torch.device("meta"):
            model = loader.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        model.tie_weights()
        model.generation_config = _generation_config(path, model)
    model.config.use_cache = False
    policy = Policy(model, entropy=not is_reference)
    policy.is_actor = not is_reference
    return policy


def load_teacher(
    path: str, tokenizer: PreTrainedTokenizerBase, *, materialize: bool, trust_remote_code: bool = False
) -> Policy:
    """A frozen model that scores another's tokens, and so must have its tokenizer. materialize: as of load_policy."""
    try:
        check_model_folder(path)
    except (ValueError, OSError) as error:
        raise type(error)(f"--teacher_model: {str(error).replace('--model ', '')}") from error
    theirs, ours = load_tokenizer(path, trust_remote_code=trust_remote_code).get_vocab(), tokenizer.get_vocab()
    if theirs != ours:
        different = sorted(set(theirs.items()) ^ set(ours.items()))
        raise ValueError(
            f"--teacher_model {path} has another tokenizer than --model: {len(different)} entries differ, such as "
            f"{different[0]}. It judges the policy's tokens by their ids: choose a teacher of the same family."
        )
    return load_policy(path, materialize=materialize, trust_remote_code=trust_remote_code, is_reference=True)


def model_loader(config: Any) -> Any:
    """transformers' class that makes a model of this config."""
    if takes_images(config):
        return AutoModelForImageTextToText
    is_remote = bool(getattr(config, "auto_map", None))
    if hasattr(config, "vision_config") and not is_remote and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"Model type {config.model_type!r} takes images in a way that lightrl does not know. It knows those of "
            f"{', '.join(FAMILIES)}."
        )
    return AutoModelForCausalLM


def _generation_config(path: str, model: Any) -> GenerationConfig:
    """Its end tokens count: without it this rank would not stop where the others do."""
    try:
        config: GenerationConfig = GenerationConfig.from_pretrained(path)
    except OSError:  # the folder has none; from_pretrained makes it of the model's config then
        config = GenerationConfig.from_model_config(model.config)
    return config
