"""Policy: loads a language model, to be trained or as a frozen reference, and scores the tokens of packs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

from lightrl.config.paths import why_unreadable
from lightrl.models.allowed_tokens import AllowedTokens
from lightrl.models.buffers import as_loaded
from lightrl.models.fixed_rope import extended_length
from lightrl.models.hub import instead_of, require_reachable
from lightrl.models.logprobs import LogitTransform, chosen_logprobs
from lightrl.models.multimodal import (
    FAMILIES,
    embedded,
    join_vision,
    pack_positions,
)
from lightrl.models.packed_attention import packed_hidden_states, use_packed_attention, varies_with_length
from lightrl.models.per_sequence import run_per_sequence
from lightrl.models.token_split import SequenceGroup, Tokens, apply_to_split
from lightrl.models.tokenizer_file import as_in_file, read_tokenizer
from lightrl.records import EncodedPrompt, PackedBatch, TokenScores

disable_progress_bar()  # every rank would draw one; the run has its own

_DEQUANTISED = ("fp8", "mxfp4")  # kinds of quantisation that transformers undoes as it loads, without kernels for them
QUANTISED = "hf_quantizer"  # an attribute of transformers' models whose weights are still quantised after the load
_LOADING: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
_CLASSIFIER_HEAD = "score.weight"  # as transformers names it in a decoder that scores sequences
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_RATES = ("dropout", "pdrop", "drop_prob", "drop_rate", "drop_path_rate", "layerdrop")  # endings of names
# Entries of a generation config that contradict nothing.
_PLAIN = frozenset({"use_cache", "output_attentions", "output_hidden_states", "bos_token_id", "eos_token_id"})
_PLAIN |= {"pad_token_id", "_from_model_config", "transformers_version"}
# Model types that tests/models/test_policy.py compares with their own logits, and tests/sharing/test_sharing_model.py
# with whole sequences, so that runs need not do so.
_TESTED_TYPES = frozenset({"llama", "qwen2", "qwen3"})
_TESTED_VERSIONS = ("5.19.", "5.23.", "5.24.")  # of transformers: the test suite ran with each of them


# ---- Aligning tokens and scores ----------------------------------------------------------------------------------


def predicting_positions(cu_seqlens: Sequence[int], num_scored: Sequence[int]) -> list[int]:
    """Returns the positions whose hidden states predict the last num_scored tokens of each packed sequence.

    This is the only function that knows the off-by-one: the hidden state at position p predicts the token at p + 1.

    Args:
        cu_seqlens: S + 1 boundaries of the sequences, from 0.
        num_scored: for each sequence, how many of its last tokens are scored.
    """
    spans = zip(pairwise(cu_seqlens), num_scored, strict=True)
    return [position for (_, end), count in spans for position in range(end - 1 - count, end - 1)]


def response_batch(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float = 1.0,
    encoded: Sequence[EncodedPrompt] | None = None,
    keys: Sequence[tuple[int, int]] | None = None,
) -> PackedBatch:
    """Lays (prompt, response) pairs of token ids end to end to score the responses; nothing in the pack is trained.

    Args:
        encoded: the prompts, encoded for a vision-language model; None for a text-only model.
        keys: the names of the sequences; None numbers them.
    """
    lengths = [len(prompt) + len(response) for prompt, response in pairs]
    num_scored = [len(response) for _, response in pairs]
    cu_seqlens = (0, *accumulate(lengths))
    starts = torch.tensor(cu_seqlens[:-1]).repeat_interleave(torch.tensor(lengths))
    zeros = torch.zeros(sum(num_scored))
    batch = PackedBatch(
        input_ids=torch.tensor([token for pair in pairs for part in pair for token in part], dtype=torch.int64),
        position_ids=torch.arange(cu_seqlens[-1]) - starts,
        cu_seqlens=cu_seqlens,
        score_index=torch.tensor(predicting_positions(cu_seqlens, num_scored), dtype=torch.int64),
        targets=torch.tensor([token for _, response in pairs for token in response], dtype=torch.int64),
        sequence_index=torch.arange(len(pairs)).repeat_interleave(torch.tensor(num_scored)),
        loss_mask=zeros.bool(),
        advantages=zeros,
        sampler_logprobs=zeros,
        temperature=temperature,
        keys=tuple(keys or ((0, index) for index in range(len(pairs)))),
    )
    return batch if encoded is None else _with_images(batch, encoded)


def _with_images(batch: PackedBatch, encoded: Sequence[EncodedPrompt]) -> PackedBatch:
    lengths = [end - start for start, end in pairwise(batch.cu_seqlens)]
    vision = join_vision(encoded, batch.cu_seqlens[:-1])
    return replace(batch, position_ids=pack_positions(lengths, encoded), vision=vision)


# ---- The model ---------------------------------------------------------------------------------------------------


class Policy(nn.Module):
    """A causal language model that scores packs. All its weights, even the output embedding, are used inside forward.

    Attributes:
        is_actor: True for the model that is trained, False for a reference.
        sequence_group: ranks that split the tokens of every pack among them; None: each rank runs whole packs.
    """

    is_actor = True

    def __init__(self, hf_model: PreTrainedModel, *, entropy: bool = True) -> None:
        """Takes over a transformers model: makes its attention accept packs and removes all randomness.

        Args:
            entropy: False leaves the entropy NaN, for a frozen reference.
        """
        super().__init__()
        self.hf = hf_model
        self.entropy = entropy
        self.sequence_group: SequenceGroup | None = None
        self.takes_images = hf_model.config.model_type in FAMILIES
        text = hf_model.config.get_text_config()
        self.logits = LogitTransform(softcap=softcap_of(text), logit_scale=logit_scale(text, self.hf.config.model_type))
        prepare_decoder(hf_model)
        remove_randomness(hf_model)

    def forward(self, batch: PackedBatch) -> TokenScores:
        """Returns the scores of the response tokens."""
        return self.scores(self.hidden_states(batch), batch)

    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """Returns the states after the last layer, [T, H]; if ranks split the tokens, those of this rank only."""
        embed = self._embeddings if self.takes_images or batch.vision is not None else None
        return packed_hidden_states(self.hf.get_decoder(), batch, embed, self.sequence_group)

    def scores(self, hidden: Tensor, batch: PackedBatch) -> TokenScores:
        """Returns the scores of the response tokens from the result of hidden_states()."""
        if self.sequence_group is not None:
            return self._scores_of_split(hidden, batch, self.sequence_group)
        support = None if batch.allowed is None else AllowedTokens(batch.allowed, len(batch.targets))
        logprobs, entropy = self._score(hidden[batch.score_index], batch.targets, batch.temperature, support)
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def _scores_of_split(self, hidden: Tensor, batch: PackedBatch, group: SequenceGroup) -> TokenScores:
        def score(rows: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
            return self._score(rows, batch.targets[which], batch.temperature)

        logprobs, entropy = apply_to_split(score, hidden, batch.score_index, group)
        return TokenScores(logprobs=logprobs, entropy=entropy)

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: float, support: AllowedTokens | None = None
    ) -> tuple[Tensor, Tensor]:
        head: Any = self.hf.get_output_embeddings()
        transform = replace(self.logits, temperature=temperature, support=support, with_entropy=self.entropy)
        return chosen_logprobs(hidden, head.weight, targets, transform, bias=getattr(head, "bias", None))

    def _embeddings(self, tokens: Tokens) -> dict[str, Any]:
        """Returns the embeddings of tokens and images together, which replace the token ids."""
        if not self.takes_images:
            raise ValueError(f"The pack has images, and {self.hf.config.model_type} takes none.")
        return embedded(self.hf, tokens)


def prepare_decoder(model: PreTrainedModel) -> None:
    """Makes the decoder of a model accept packs, which run whole, or sequence by sequence where they would mix."""
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        raise _no_decoder(model, decoder)
    if not use_packed_attention(decoder):
        run_per_sequence(model)


def _no_decoder(model: PreTrainedModel, found: object) -> ValueError:
    return ValueError(
        f"Model type {model.config.model_type!r} cannot be trained: get_decoder() of {type(model).__name__} gives a "
        f"{type(found).__name__} and not the model below the output head, so there may be layers between the two that "
        "lightrl would leave out. Choose another model."
    )


def remove_randomness(model: nn.Module) -> None:
    """Turns dropout, dropped layers and the noise of routers off for good, in training mode too.

    Modules hold their rate in an nn.Dropout or, for the functional form, as a number. Modules with a jitter (Mixtral,
    PhiMoE, DBRX) stay in evaluation mode instead: in training mode PhiMoE draws its experts whatever the number is.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if name.endswith(_RATES) and isinstance(value, float):
                setattr(module, name, 0.0)
            elif "jitter" in name:
                _keep_in_evaluation(module)


def _keep_in_evaluation(module: Any) -> None:
    module.eval()
    module.train = partial(_stay, module)  # the train() of an enclosing module calls this


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def softcap_of(text_config: Any) -> float | None:
    """Returns the cap on the logits, which most configs call final_logit_softcapping."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    return next((float(cap) for name in names if (cap := getattr(text_config, name, None))), None)


def logit_scale(text_config: Any, model_type: str) -> float:
    """Returns the factor of the logits; Cohere, Falcon-H1 and HyperCLOVA X state a factor, Granite a divisor."""
    scale = getattr(text_config, "logit_scale", None) or getattr(text_config, "lm_head_multiplier", None) or 1.0
    divisor = getattr(text_config, "logits_scaling", None) or 1.0
    return float(scale * divisor if "hyperclovax" in model_type else scale / divisor)


def persistent_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, buffer) of the buffers that belong to a saved model, sorted by name."""
    state = model.state_dict(keep_vars=True).items()  # a module may also have extra state, which is not a tensor
    return sorted((key, item) for key, item in state if isinstance(item, Tensor) and not isinstance(item, nn.Parameter))


# ---- Loading -----------------------------------------------------------------------------------------------------


def check_model_folder(path: str, option: str = "--model") -> None:
    """Raises an error unless the path can be a model, before transformers mistakes a wrong folder for a hub name."""
    folder = Path(path)
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1 or os.path.lexists(path)
    if not path or (":" in path and not os.path.lexists(path)):
        builtin = ", nor builtin:addition" if option == "--model" else ""
        raise ValueError(f"{option} {path!r} is neither a folder nor a Hugging Face name{builtin}.")
    if not looks_local:
        require_reachable(path, option)
        return
    if problem := why_unreadable(path, is_folder=True):
        hint = " Write out ~, which only a shell replaces." if path.startswith("~") else ""
        raise FileNotFoundError(f"{option} {path}: {problem}.{hint}")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{option} {path}: the folder has no config.json, so it holds no Hugging Face model.{instead_of(folder)}"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(f"{option} {path}: the folder has no tokenizer. Save it there with save_pretrained().")


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder or Hugging Face name."""
    with explained(path, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = read_tokenizer(path, trust_remote_code=trust_remote_code)
        return tokenizer if type(tokenizer) is PreTrainedTokenizerFast else as_in_file(tokenizer, path)


def load_config(path: str, *, trust_remote_code: bool = False) -> Any:
    """Loads the transformers config of a folder or Hugging Face name."""
    with explained(path, "config"):
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)


@contextmanager
def explained(path: str, what: str) -> Iterator[None]:
    """Turns any error of a library about an unusable file into one sentence that names the model."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise _unreadable(path, what, error) from error


def _unreadable(path: str, what: str, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:600] or type(error).__name__
    return ValueError(f"--model {path}: its {what} cannot be read ({reason}).")


def stated_context(config: Any) -> int:
    """Returns how many positions a language model has; 2^30 if its config states no limit, as for recurrent models."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    stated = next((int(length) for name in names if (length := getattr(config, name, None))), 1 << 30)
    return max(stated, extended_length(config)) if "yarn" in str(getattr(config, "rope_parameters", None)) else stated


def load_policy(path: str, *, materialize: bool, trust_remote_code: bool = False, is_reference: bool = False) -> Policy:
    """Loads the model in float32.

    Args:
        materialize: False builds it on the meta device, for ranks that receive its weights later.
    """
    config = load_config(path, trust_remote_code=trust_remote_code)
    loader = _loader_of_quantised(config, path) if hasattr(config, "quantization_config") else model_loader(config)
    if materialize:
        with explained(path, "weights"):
            model, found = loader.from_pretrained(path, trust_remote_code=trust_remote_code, **_LOADING)
        untied = model.get_expanded_tied_weights_keys().keys() - model.all_tied_weights_keys.keys()
        if untied or found["missing_keys"] or _CLASSIFIER_HEAD in found["unexpected_keys"] or hasattr(model, QUANTISED):
            raise quantised_weights(path) if hasattr(model, QUANTISED) else _other_weights(path, found, untied)
    else:
        with explained(path, "config"):
            model = _empty_model(loader, config, path, trust_remote_code)
    if not _PLAIN.issuperset(model.generation_config.to_diff_dict()):
        _make_saveable(model.generation_config, path)
    policy = Policy(model, entropy=not is_reference)
    policy.is_actor = not is_reference
    return policy


def _make_saveable(generation: GenerationConfig, path: str) -> None:
    """Resolves a contradiction in a generation config: transformers reads it, and refuses to save it after the run.

    Folders that name a temperature and no do_sample mean to sample, such as the first ones of Llama 2.
    """
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.update(do_sample=True)
        with explained(path, "generation config"):
            generation.validate(strict=True)


def _loader_of_quantised(config: Any, path: str) -> Any:
    refuse_quantised(config, path)
    return model_loader(config)


def refuse_quantised(config: Any, path: str) -> None:
    """Raises ValueError for a kind that stays quantised: to load it may be a collective, but only rank 0 loads."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and quantised.get("quant_method") not in _DEQUANTISED:
        raise quantised_weights(path)


def quantised_weights(path: str) -> ValueError:
    """Returns the error for a model with packed weights and scales, which other ranks and engines would not have."""
    return ValueError(
        f"--model {path} holds quantised weights (quantization_config in its config.json), which are neither trained "
        "nor sharded here. Give a folder with its weights in bfloat16 or float32."
    )


def _other_weights(path: str, found: Mapping[str, Iterable[str]], untied: Iterable[str]) -> ValueError:
    if _CLASSIFIER_HEAD in found["unexpected_keys"]:
        return ValueError(
            f"--model {path} is a reward model or another classifier of sequences (it has {_CLASSIFIER_HEAD}), which "
            "generates no text. Choose a language model; a reward model is given by --reward_model."
        )
    names = sorted(found["missing_keys"])
    if not names:
        return ValueError(
            f"--model {path}: its config.json says tie_word_embeddings, but its files hold {min(untied)} with values "
            'of its own, which engines and other ranks would leave out. Write "tie_word_embeddings": false there.'
        )
    return ValueError(
        f"--model {path}: its files lack {len(names)} of the weights that its config describes, such as {names[0]}; "
        "they would be random. Copy the files anew."
    )


def model_loader(config: Any) -> Any:
    """Returns transformers' class that makes a model of this config."""
    if config.model_type in FAMILIES:
        return AutoModelForImageTextToText
    if hasattr(config, "vision_config"):
        _check_text_only(config)
    return AutoModelForCausalLM


def _check_text_only(config: Any) -> None:
    """Raises ValueError unless transformers has a language model for a config with vision."""
    # A private table of transformers that lists the config classes which AutoModelForCausalLM accepts. It can go once a
    # public function tells this without making a model; 5.19.0 has none:
    # https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/auto/auto_factory.py
    if not getattr(config, "auto_map", None) and type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"Model type {config.model_type!r} takes images in a way that lightrl does not know. It knows those of "
            f"{', '.join(FAMILIES)}."
        )


def _empty_model(loader: Any, config: Any, path: str, trust_remote_code: bool) -> Any:
    """Builds the model on the meta device."""
    with torch.device("meta"):
        model = as_loaded(loader.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code))
    model.tie_weights()
    try:  # its end tokens matter: without them this rank would not stop where the others do
        model.generation_config = GenerationConfig.from_pretrained(path)
    except OSError:  # the folder has none; from_pretrained then derives it from the model's config
        model.generation_config = GenerationConfig.from_model_config(model.config)
    return model


def needs_score_check(model: PreTrainedModel) -> bool:
    """Returns whether a run should check this model's scores, because the tests compare no model of this kind."""
    config = model.config
    is_tested = config.model_type in _TESTED_TYPES and type(model).__module__.startswith("transformers.")
    is_tested &= transformers.__version__.startswith(_TESTED_VERSIONS)
    is_plain = set(getattr(config, "layer_types", None) or ()) <= {"full_attention"} and not varies_with_length(config)
    return not (is_tested and is_plain)
