"""The parts that SFT, DPO and reward-model training share: they learn from answers in data, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.config import OfflineConfig, template_arguments
from lightrl.data.balance import assign_to_ranks
from lightrl.data.chat_arguments import uses_template, warn_of_date, warn_of_written_messages
from lightrl.data.example_packing import pack_examples, pair_positions
from lightrl.data.examples import keep_fitting
from lightrl.data.media_fields import MediaFields
from lightrl.data.prompts import unknown_tokens
from lightrl.data.sampler import PromptSampler
from lightrl.metrics import Statistics
from lightrl.models.policy import Policy
from lightrl.records import Example, PackedBatch
from lightrl.strategy.saving.state_reader import load_object
from lightrl.trainers.fit import StepReport, Trainer
from lightrl.trainers.policy_step import describe_update, even_parts
from lightrl.trainers.run import RunContext, load_start_policy
from lightrl.trainers.turn_end import stop_at

Examples = Mapping[int, Example]  # of the whole batch, by position: ranks that split a model see each other's examples
LossFn = Callable[[Any, PackedBatch, Examples, Statistics], Tensor]
"""The mean loss of a micro-batch, from the model's output; what it measures goes to the statistics."""
PackFn = Callable[[Sequence[Example]], list[PackedBatch]]
WeightFn = Callable[[PackedBatch], float | Tensor]
"""The number of terms that the loss of a micro-batch is a mean over."""


class ExampleData:
    """The examples of a run: draws each step's batch, takes this rank's part, and packs it."""

    def __init__(self, run: RunContext, build: Callable[[Sequence[Any]], Sequence[Example]]) -> None:
        """Reads the data; build makes one example from a record."""
        self._run = run
        config: OfflineConfig = run.config
        with run.strategy.comm.phase("set-up", local=True):
            if run.strategy.comm.is_main and uses_template(config.data.chat_template, run.train_records):
                warn_of_date(run.tokenizer, template_arguments(config.data))
                warn_of_written_messages(run.train_records, config.data.prompt_field)
            self.ends: set[int] = set()  # the last tokens of the turns to learn from
            self.train, self.num_skipped = _keep_fitting(run, build(run.train_records), self.ends)
            evaluated, _ = _keep_fitting(run, build(run.eval_records), set())
            num_steps, num_drawn = _progress(run.checkpoint)
        evaluated = evaluated[: config.eval.max_examples or None]
        self.evaluation = [replace(example, position=position) for position, example in enumerate(evaluated)]
        self.sampler = PromptSampler(len(self.train), config.batch_size, config.seed)
        self._end = 0  # total number of examples to draw; 0 fills every batch
        if not config.max_steps:
            self._end = config.num_epochs * len(self.train)
            num_left = max(0, self._end - num_drawn)  # the steps so far may have had batches of other sizes
            config = replace(config, max_steps=num_steps + -(-num_left // config.batch_size))
        self.config: Any = config  # with max_steps

    @property
    def epoch(self) -> float:
        """The number of passes over the data so far."""
        return self.sampler.num_drawn / len(self.train)

    def draw(self) -> list[Example]:
        """Returns the global batch of the next step, alike on every rank."""
        count: int = self.config.batch_size
        if self._end:
            count = min(count, self._end - self.sampler.num_drawn)
        drawn = self.sampler.draw(count)
        return [replace(self.train[index], position=position) for position, index in enumerate(drawn)]

    def of_rank(self, batch: Sequence[Example]) -> list[Example]:
        """Returns this rank's part of a global batch; all ranks get about the same number of tokens."""
        rank, world = self._run.strategy.comm.rank, self._run.strategy.comm.world
        owners = [position % world for position in range(len(batch))]
        ranks = assign_to_ranks([example.num_tokens for example in batch], owners, world)
        return [example for example, owner in zip(batch, ranks, strict=True) if owner == rank]

    def pack(self, mine: Sequence[Example]) -> list[PackedBatch]:
        """Cuts this rank's examples into micro-batches, the same number on every rank; dummies fill up."""
        parts = even_parts(mine, self.config, self._run.strategy.comm)
        return [pack_examples(part, encode=self._run.encoder).to(self._run.strategy.device) for part in parts]

    def describe(self) -> str:
        """Returns the batch arithmetic in one line."""
        config, count, world = self.config, len(self.train), self._run.strategy.comm.world
        per_rank = -(-config.batch_size // world)
        if config.micro_batch_size:
            micro = f"{-(-per_rank // config.micro_batch_size)} micro-batches of <= {config.micro_batch_size}"
        else:
            micro = f"micro-batches of <= {config.max_tokens_per_microbatch} tokens"
        num_drawn = self._end or config.max_steps * config.batch_size
        skipped = f" ({self.num_skipped} too long, left out)" if self.num_skipped else ""
        return (
            f"{count} examples{skipped}, {config.batch_size} a step, on each of {world} rank(s) about {per_rank} in "
            f"{micro}; {config.max_steps} step(s), {num_drawn / count:.2f} epochs{self._unended()}"
        )

    def _unended(self) -> str:
        tokenizer = self._run.tokenizer
        if tokenizer.eos_token_id is not None or tokenizer.chat_template:
            return ""
        return "; the tokenizer has no end token (eos_token), so nothing teaches the model to stop"


class ExampleLearner:
    """Learns from a batch of examples by one optimizer step, and measures the same loss on held-out examples."""

    def __init__(
        self, trainer: Trainer, examples: ExampleData, loss: LossFn, weight: WeightFn, pack: PackFn | None = None
    ) -> None:
        """pack: cuts this rank's examples into micro-batches; None only packs them."""
        self._trainer = trainer
        self._examples = examples
        self._loss = loss
        self._weight = weight
        self._pack = pack or examples.pack

    def step(self) -> StepReport:
        """Draws a batch, packs this rank's part, learns, reports."""
        trainer, statistics = self._trainer, self._trainer.statistics
        batch = self._examples.draw()
        mine, by_position = self._examples.of_rank(batch), _by_position(batch)
        with trainer.timed("learn", "learn"):
            result = trainer.strategy.train_batch(
                self._pack(mine),
                lambda output, pack: self._loss(output, pack, by_position, statistics),
                self._weight,
                model=trainer.model,
            )
        describe_update(result, statistics)
        statistics.maximum("epoch", self._examples.epoch)
        answers = [answer for example in mine for answer in example.answers]
        trained = sum(sum(answer.loss_mask) for answer in answers)
        statistics.add("tokens/trained", trained)
        statistics.add("tokens/prompt", sum(answer.num_tokens for answer in answers) - trained)
        return StepReport(metrics=statistics.reduce(trainer.strategy.comm))

    def evaluate(self) -> dict[str, float]:
        """Measures eval/loss, and the other metrics of the loss, over all held-out examples at once."""
        trainer, statistics, examples = self._trainer, Statistics(), self._examples.evaluation
        if not examples:
            return {}
        by_position = _by_position(examples)
        with trainer.strategy.comm.phase("evaluation"):
            packs = self._pack(self._examples.of_rank(examples))
            for output, batch in zip(trainer.strategy.forward(packs, model=trainer.model), packs, strict=True):
                weight = float(self._weight(batch))
                statistics.mean("loss", float(self._loss(output, batch, by_position, statistics)) * weight, weight)
        return {f"eval/{name}": value for name, value in statistics.reduce(trainer.strategy.comm).items()}


def _progress(checkpoint: Path | None) -> tuple[int, int]:
    """Returns how many steps a run has done before it continues from a checkpoint, and how many examples they took."""
    if checkpoint is None or not (checkpoint / "state.pt").is_file():  # a strategy of a user may keep it elsewhere
        return 0, 0
    state = load_object(checkpoint / "state.pt")["client_state"]
    return int(state["step"]), int(state.get("sampler", {}).get("num_drawn", 0))  # resume() refuses other states


def _by_position(examples: Sequence[Example]) -> Examples:
    return {example.position: example for example in examples}


def _keep_fitting(run: RunContext, examples: Sequence[Example], ends: set[int]) -> tuple[Sequence[Example], int]:
    """Returns the examples that fit into the model's context, and the number of others; adds to the answers' ends."""
    config: OfflineConfig = run.config
    if config.data.max_tokens > run.context:
        raise ValueError(
            f"--data.max_tokens {config.data.max_tokens} is more than the model's context of {run.context} tokens."
        )
    max_tokens = config.data.max_tokens or run.context
    fitting, num_skipped = keep_fitting(examples, max_tokens=max_tokens, too_long=config.data.too_long)
    longest: Example | None = None
    longest_answer = 0
    for example in fitting:  # read once, since streamed examples are made anew each time
        longest = example if longest is None or example.num_tokens > longest.num_tokens else longest
        for answer in example.answers:
            longest_answer = max(longest_answer, answer.num_tokens)
            trained = zip(answer.response_ids, answer.loss_mask, (*answer.loss_mask[1:], False), strict=True)
            ends.update(token for token, is_trained, goes_on in trained if is_trained and not goes_on)
            if max(token_ids := (*answer.prompt_ids, *answer.response_ids)) >= run.vocab_size:
                raise unknown_tokens(token_ids, run.tokenizer, run.vocab_size, f"{example.where}: the example")
    run.longest_sequences.append(longest_answer)
    if longest and not config.micro_batch_size and longest.num_tokens > config.max_tokens_per_microbatch:
        raise ValueError(
            f"--max_tokens_per_microbatch {config.max_tokens_per_microbatch} cannot hold {longest.where}: raise it "
            f"to at least {longest.num_tokens}, or give --micro_batch_size."
        )
    return fitting, num_skipped


def media_of(run: RunContext) -> MediaFields:
    """Returns the fields of a line that name images and videos, with the processor of a model that takes them."""
    data = run.config.data
    return MediaFields(image_field=data.image_field, video_field=data.video_field, processor=run.media)


# ---- Models and losses -----------------------------------------------------------------------------------------------


def load_policy(run: RunContext, examples: ExampleData) -> Policy:
    """Loads the model that the run starts from, to learn from the examples and to stop where their answers end."""
    policy = load_start_policy(run)
    policy.entropy = False  # no loss of offline training reads it
    # The template of many base models ends a turn by a token at which the model does not stop, since it has seen no
    # conversation yet. Trained on turns, it would write that token and go on.
    if names := stop_at(examples.ends, policy.hf, run.tokenizer):
        ends = " or ".join(names)
        run.strategy.print(f"Answers end with {ends}, at which the trained model will stop (generation_config.json).")
    return policy


def prepare_to_train(run: RunContext, config: OfflineConfig, load: Callable[[], nn.Module]) -> nn.Module:
    """Loads a model and gives it an optimizer, and a schedule over the whole run."""
    strategy = run.strategy
    with strategy.comm.phase("loading the model", local=True):
        model = load()
    trained: nn.Module = strategy.prepare_trained(model, lr=config.lr, schedule_length=config.schedule_length).model
    return trained


def pair_weight(batch: PackedBatch) -> float:
    """Returns the number of pairs in a micro-batch."""
    return float(len(pair_positions(batch)))


def describe_pairs(chosen: Tensor, rejected: Tensor, statistics: Statistics) -> None:
    """Adds statistics of the pairs' rewards for both answers, each [P]; a tie counts as no success."""
    with torch.no_grad():
        margins = chosen - rejected
        statistics.mean("accuracy", float((margins > 0).sum()), len(margins))
        statistics.mean("margin", float(margins.sum()), len(margins))
        statistics.mean("reward/chosen", float(chosen.sum()), len(margins))
        statistics.mean("reward/rejected", float(rejected.sum()), len(margins))
