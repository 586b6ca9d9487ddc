"""The groups of options that say when and how a run evaluates."""

from __future__ import annotations

from dataclasses import dataclass

from lightrl.config.options import option


@dataclass(kw_only=True, slots=True)
class EvalScheduleConfig:
    """When a run evaluates."""

    every: int = option(20, at_least=0)
    """Steps between evaluations. One more runs before the first step and one after the last. 0: never evaluate."""


@dataclass(kw_only=True, slots=True)
class ExampleEvalConfig(EvalScheduleConfig):
    """Evaluation on examples."""

    max_examples: int = option(0, at_least=0)
    """Evaluate on this many examples, the first ones. 0: on all."""


@dataclass(kw_only=True, slots=True)
class EvalConfig(EvalScheduleConfig):
    """Evaluation on sampled responses."""

    temperature: float = option(1.0, at_least=0)
    """Sampling temperature of the evaluation. 0: greedy."""
    top_p: float = option(1.0, above=0, at_most=1)
    """Draw from the likeliest tokens that together have this probability. 1: from all."""
    top_k: int = option(0, at_least=0)
    """Draw from so many of the likeliest tokens. 0: from all."""
    min_new_tokens: int = option(0, at_least=0)
    """No end token or stop string ends a response before it has as many tokens."""
    presence_penalty: float = option(0.0, at_least=-2, at_most=2)
    """Taken from the logit of every token that the response has already."""
    frequency_penalty: float = option(0.0, at_least=-2, at_most=2)
    """Taken from the logit of a token each time that the response has it already."""
    repetition_penalty: float = option(1.0, above=0)
    """Divides the positive logits of tokens that prompt or response have already, and multiplies the negative ones. 1:
    off."""
    max_prompts: int = option(0, at_least=0)
    """Evaluate on this many prompts, the first ones. 0: on all."""
    n: int = option(1, at_least=1)
    """Number of samples of each prompt."""
    k: tuple[int, ...] = option((), at_least=1)
    """Report pass@k for these k: the chance that k samples of a prompt hold a right one, estimated from all n."""
    source_field: str = ""
    """Field of a line that names where its prompt is from, such as source; the metrics come for each source, too."""

    def check(self) -> None:
        """Raises ValueError for a k above n, and for several samples that are all the same."""
        if self.n < max(self.k, default=1):
            raise ValueError(
                f"--eval.k {max(self.k)} needs as many samples of a prompt, and --eval.n is {self.n}: raise it."
            )
        if self.n > 1 and not self.temperature:
            raise ValueError(
                f"--eval.temperature 0 gives {self.n} equal samples of a prompt: raise it, or leave --eval.n at 1."
            )

    @property
    def sampling(self) -> dict[str, float]:
        """What changes the distribution that is sampled from, which training may not do."""
        names = ("top_p", "top_k", "min_new_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")
        return {name: getattr(self, name) for name in names}
