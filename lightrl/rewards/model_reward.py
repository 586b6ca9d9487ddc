"""A reward from a scalar reward model: a sequence classifier with one output, sharded like the policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lightrl.comm import Comm
from lightrl.models.chat_text import render, tools_of, warn_of_lost_messages
from lightrl.models.option_names import naming
from lightrl.models.policy import check_model_folder, load_config, load_tokenizer, response_batch, stated_context
from lightrl.models.reward_model import check_reward_scores, load_reward_model
from lightrl.records import PackedBatch, Sample
from lightrl.rewards.scoring import Outcome, failed, score_outcome

_NAME = "reward_model"


class ModelHost(Protocol):
    """The part of a strategy that the reward model uses."""

    comm: Comm
    device: torch.device
    tokenizer: Any  # the policy's

    @property
    def materializes_weights(self) -> bool: ...

    def prepare(self, model: nn.Module, /, *, is_rlhf: bool = ...) -> Any: ...

    def forward(self, data: Sequence[Any], /, *, model: nn.Module) -> list[Any]: ...


class ModelReward:
    """The reward model's score of prompt and response together. Every rank must call it, even without samples.

    chat_template: `auto` renders the conversation with the model's own template if its tokenizer has one, and `always`
    requires one. `never` joins prompt and response as the policy saw them; they are tokenised again if the two
    tokenizers differ.

    append_eos applies only without a template, because a template ends its turns itself: `auto` appends the end token
    to responses that the policy ended, but not to those that were cut off; `always` and `never` do what they say.
    """

    is_collective = True
    works_apart = True  # with a host of its own on each rank

    def __init__(
        self,
        *,
        path: str,
        trust_remote_code: bool = False,
        chat_template: Literal["auto", "always", "never"] = "auto",
        append_eos: Literal["auto", "always", "never"] = "auto",
        max_tokens: int = 16384,
    ) -> None:
        _check_choices(chat_template=chat_template, append_eos=append_eos)
        if max_tokens < 1:
            raise ValueError(f"reward_model.max_tokens is {max_tokens}: it must be at least 1.")
        config = _checked_config(path, trust_remote_code=trust_remote_code).get_text_config()
        self._context, self._vocab_size = stated_context(config), config.vocab_size
        self._path = path
        self._trust_remote_code = trust_remote_code
        self._append_eos = append_eos
        self._max_tokens = max_tokens  # in one forward of a rank
        with naming("--reward_model"):
            self._tokenizer: Any = load_tokenizer(path, trust_remote_code=trust_remote_code)
        self._renders = chat_template != "never" and bool(self._tokenizer.chat_template)
        if chat_template == "always" and not self._renders:
            raise ValueError(f"reward_model.chat_template is always, and the tokenizer in {path} has no template.")
        if append_eos == "always" and self._tokenizer.eos_token_id is None:
            raise ValueError(f"reward_model.append_eos is always, and the tokenizer in {path} has no end token.")
        self._host: ModelHost | None = None
        self._model: Any = None
        self._shares_tokenizer = False

    def prepare(self, host: ModelHost) -> None:
        """Loads and shards the model; every rank calls it."""
        with host.comm.phase("loading the reward model", local=True), naming("--reward_model"):
            model = load_reward_model(
                self._path,
                self._tokenizer,
                materialize=host.materializes_weights,
                seed=0,
                trust_remote_code=self._trust_remote_code,
            )
            if host.materializes_weights:
                check_reward_scores(model)
            policy_vocabulary: dict[str, int] = getattr(host.tokenizer, "get_vocab", dict)()
            self._shares_tokenizer = policy_vocabulary == self._tokenizer.get_vocab()
        self._model = host.prepare(model, is_rlhf=True)
        self._host = host

    def __call__(self, samples: Sequence[Sample], /) -> list[Outcome]:
        assert self._host is not None, "prepare() was not called"
        with self._host.comm.phase("reward model's tokens", local=True):
            sequences = [self._token_ids(sample) for sample in samples]
        flaws = [self._flaw(ids) for ids in sequences]
        fitting = [index for index, flaw in enumerate(flaws) if not flaw]
        outcomes: list[Outcome] = [
            failed(_NAME, [sample], ValueError(flaw)) for sample, flaw in zip(samples, flaws, strict=True)
        ]
        for index, value in zip(fitting, self._scores([sequences[index] for index in fitting]), strict=True):
            outcomes[index] = score_outcome(_NAME, samples[index], value)
        return outcomes

    def _flaw(self, ids: Sequence[int]) -> str:
        """Returns why the model cannot score these tokens; empty if it can."""
        if len(ids) > self._context:
            return f"prompt and response have {len(ids)} tokens, and the reward model takes {self._context}"
        if (last := max(ids, default=0)) >= self._vocab_size:
            name = self._tokenizer.convert_ids_to_tokens(last)
            return f"the token {name!r} has the id {last}, and the reward model's ids end at {self._vocab_size - 1}"
        return ""

    # ---- Tokens ------------------------------------------------------------------------------------------------

    def _token_ids(self, sample: Sample) -> list[int]:
        if sample.prompt.images or sample.prompt.videos or sample.images:
            raise ValueError(f"Prompt {sample.prompt.index} has images or videos, which the reward model cannot see.")
        if self._renders and sample.prompt.messages:
            messages = [*map(dict, sample.prompt.messages), {"role": "assistant", "content": sample.text}]
            text = render(self._tokenizer, messages, tools_of(sample.prompt.fields))
            warn_of_lost_messages(messages, text, "the reward model's prompts")
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._shares_tokenizer:
            ids = [*sample.prompt_ids, *sample.response_ids]
        else:
            ids = list(self._tokenizer(sample.prompt.text + sample.text)["input_ids"])
        return self._ended(ids, sample)

    def _ended(self, ids: list[int], sample: Sample) -> list[int]:
        """Returns the tokens with exactly one end token, or none, whatever the sampler and the tokenizer left there."""
        end = self._tokenizer.eos_token_id
        while ids and ids[-1] == end:
            ids = ids[:-1]
        has_end = self._append_eos == "always" or (self._append_eos == "auto" and sample.finish_reason == "stop")
        return [*ids, end] if has_end and end is not None else ids

    # ---- Scores ------------------------------------------------------------------------------------------------

    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Scores this rank's sequences; a collective."""
        assert self._host is not None
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        parts = list(_cut(order, [len(ids) for ids in sequences], self._max_tokens))
        batches = [_pack([sequences[index] for index in part]) for part in parts] or [_pack([[0]])]
        scored: list[Tensor] = self._host.forward([b.to(self._host.device) for b in batches], model=self._model)
        values = [0.0] * len(sequences)
        for part, scores in zip(parts, scored, strict=False):  # a rank without samples scored one dummy
            for index, value in zip(part, scores.tolist(), strict=True):
                values[index] = value
        return values


def _cut(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yields parts of at most max_tokens tokens, except for a single sequence that is longer."""
    part: list[int] = []
    total = 0
    for index in order:
        if part and total + lengths[index] > max_tokens:
            yield part
            part, total = [], 0
        part.append(index)
        total += lengths[index]
    if part:
        yield part


def _pack(sequences: Sequence[Sequence[int]]) -> PackedBatch:
    return response_batch([(ids, ()) for ids in sequences])


def _checked_config(path: str, *, trust_remote_code: bool) -> Any:
    """Returns the config of a classifier with one output; a language model would get a head of random weights."""
    if not path:
        raise ValueError("The reward reward_model needs --reward_model, the folder or name of the model.")
    check_model_folder(path, "--reward_model")
    with naming("--reward_model"):
        config = load_config(path, trust_remote_code=trust_remote_code)
    kinds = config.architectures or ["of no known kind"]
    if not any("SequenceClassification" in kind for kind in kinds):
        raise ValueError(
            f"--reward_model {path} is {', '.join(kinds)}, which gives no score. Choose a model for sequence "
            "classification with one output."
        )
    if config.num_labels != 1:
        raise ValueError(f"--reward_model {path} has {config.num_labels} outputs: a reward model has one.")
    return config


def _check_choices(**given: str) -> None:
    for name, value in given.items():
        if value not in ("auto", "always", "never"):
            raise ValueError(f"reward_model.{name} is {value!r}: choose one of auto, always, never.")
