"""The temperatures at which responses can be drawn: in training, and by vLLM."""

from __future__ import annotations

from typing import Any

ABOVE_ZERO = (
    "it must be above 0, since greedy samples of a prompt are all the same and teach nothing. For a greedy evaluation "
    "use --eval.temperature 0"
)
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/sampling_params.py (_MAX_TEMP, and SamplingParams._verify_args)
_LOWEST, _HIGHEST = 0.01, 2.0


def check_temperatures(config: Any) -> None:
    """Raises ValueError for a temperature of a run at which its engine would not draw."""
    if config.engine == "vllm":
        require_drawable("--temperature", config.temperature)
        require_drawable("--eval.temperature", config.eval.temperature)


def require_drawable(name: str, temperature: float) -> None:
    """Raises ValueError if vLLM would draw at another temperature, whose logprobs are not those of the trainer."""
    if temperature and not _LOWEST <= temperature <= _HIGHEST:
        raise ValueError(
            f"{name} {temperature:g}: vLLM draws greedily (0) or at temperatures from {_LOWEST} to {_HIGHEST:g}, and "
            "silently raises a lower one. Give one of these, or use --engine native."
        )
