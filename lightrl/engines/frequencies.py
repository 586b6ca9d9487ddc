"""Makes an engine with its own rotary code choose the frequencies to which the trainer's model was fixed.

Used only for models whose frequencies vary with the length (lightrl.models.fixed_rope).
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from lightrl.models.fixed_rope import fix_frequencies, fixed_length, original_length


def limit_vllm(source: PreTrainedModel, arguments: dict[str, Any]) -> None:
    """Sets vLLM's max_model_len, from which it chooses the factors of `longrope`, once for all requests.

    vLLM takes the long factors if max_model_len exceeds the original length. Its `dynamic` rope never grows:
    https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/rotary_embedding/__init__.py
    """
    longest, original = _lengths(source)
    if original is None:
        _refuse_growth(source, longest)
        return
    given = int(arguments.get("max_model_len") or -1)
    if given < 0:  # vLLM would keep the original length, whatever the trainer chose
        arguments["max_model_len"] = longest
    elif (given > original) != (longest > original):
        theirs, ours = ("long", "short") if given > original else ("short", "long")
        raise ValueError(
            f"--engine_args max_model_len={given} makes vLLM take the {theirs} rope factors of "
            f"{source.config.model_type}, which change at {original} tokens. The trainer takes the {ours} ones, since "
            f"the longest sequence of this run has {longest} tokens. Give max_model_len={longest}, or leave it out."
        )


def check_sglang(source: PreTrainedModel) -> None:
    """Raises ValueError if SGLang would use other frequencies than the trainer.

    SGLang chooses the factors of `longrope` for each batch of requests, and scales `dynamic` rope for the full length:
    https://github.com/sgl-project/sglang/blob/v0.5.23/python/sglang/srt/layers/rotary_embedding/rope_variant.py
    """
    longest, original = _lengths(source)
    if original is None:
        raise ValueError(
            f"SGLang scales the dynamic rope of {source.config.model_type} for its full length, and the trainer for "
            "the sequences of the run. Use --engine native or vllm."
        )
    if longest > original:
        raise ValueError(
            f"Sequences of this run may have {longest} tokens. Above {original}, SGLang chooses the rope factors of "
            f"{source.config.model_type} by the longest request of each batch, so that scores would depend on the "
            f"batch. Use --engine native or vllm, or allow at most {original} tokens of prompt and response."
        )


def _lengths(source: PreTrainedModel) -> tuple[int, int | None]:
    """Returns the sequence length to which the model was fixed, and the original length of `longrope`."""
    fix_frequencies(source)  # no change, unless nobody fixed it
    longest = fixed_length(source)
    assert longest is not None
    return longest, original_length(source.config)


def _refuse_growth(source: PreTrainedModel, longest: int) -> None:
    positions = int(source.config.get_text_config().max_position_embeddings)
    if longest > positions:
        raise ValueError(
            f"Sequences of {longest} tokens are longer than the {positions} positions of {source.config.model_type}. "
            f"Its dynamic rope grows for them in the trainer and not in vllm. Use --engine native."
        )
