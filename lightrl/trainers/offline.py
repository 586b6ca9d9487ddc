"""What trainers share whose data has the answers: examples, batches of them, one optimizer step each. No engine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightrl.config import OfflineConfig
from lightrl.data.balance import assign_to_ranks
from lightrl.data.example_packing import pack_examples
from lightrl.data.examples import keep_fitting
from lightrl.data.packing import split_micro_batches
from lightrl.data.sampler import PromptSampler
from lightrl.metrics import Statistics
from lightrl.models.lora import add_adapters
from lightrl.models.policy import Policy, check_scores, context_length, load_policy
from lightrl.records import Example, PackedBatch
from lightrl.strategy import is_actor
from lightrl.trainers.base import StepReport, Trainer

Examples = Mapping[int, Example]  # all of the batch, by position: ranks that split a model see each other's


class OfflineTrainer(Trainer):
    """A step draws batch_size examples and learns from them; a subclass says what they are and what the loss is."""

    config: OfflineConfig

    # ---- What a trainer writes ---------------------------------------------------------------------------------

    @abstractmethod
    def build_examples(self, records: list[Any]) -> list[Example]:
        """Of every record one; rank by rank, no collectives."""

    @abstractmethod
    def load_model(self) -> nn.Module:
        """The model to train, on this rank, not yet prepared."""

    @abstractmethod
    def weight(self, batch: PackedBatch) -> float | Tensor:
        """What the loss of a micro-batch is a mean over: its share of the denominator over all of them."""

    @abstractmethod
    def loss(self, output: Any, batch: PackedBatch, examples: Examples, statistics: Statistics) -> Tensor:
        """The mean over the micro-batch; what it sees of output goes to the statistics."""

    # ---- Set-up ------------------------------------------------------------------------------------------------

    def read_data(self, train: list[Any], evaluation: list[Any]) -> None:
        config = self.config
        self.examples, self.num_skipped = self._fitting(self.build_examples(train))
        evaluated, _ = self._fitting(self.build_examples(evaluation))
        evaluated = evaluated[: config.eval.max_examples or None]
        self.eval_examples = [replace(example, position=place) for place, example in enumerate(evaluated)]
        self.sampler = PromptSampler(len(self.examples), config.batch_size, config.seed)
        self._end = 0  # number of examples to draw in all; 0 fills every batch
        if not config.max_steps:
            self._end = config.num_epochs * len(self.examples)
            self.config = replace(config, max_steps=-(-self._end // config.batch_size))

    def _fitting(self, examples: list[Example]) -> tuple[list[Example], int]:
        config = self.config
        context = context_length(self.model_path, trust_remote_code=config.trust_remote_code)
        if config.data.max_tokens > context:
            raise ValueError(
                f"--data.max_tokens {config.data.max_tokens} is more than the model's context of {context} tokens."
            )
        max_tokens = config.data.max_tokens or context
        fitting, num_skipped = keep_fitting(examples, max_tokens=max_tokens, too_long=config.data.too_long)
        longest = max(fitting, key=lambda example: example.num_tokens, default=None)
        if longest and not config.micro_batch_size and longest.num_tokens > config.max_tokens_per_microbatch:
            raise ValueError(
                f"--max_tokens_per_microbatch {config.max_tokens_per_microbatch} cannot hold {longest.where}: raise it "
                f"to at least {longest.num_tokens}, or give --micro_batch_size."
            )
        return fitting, num_skipped

    def build_models(self) -> nn.Module:
        strategy = self.strategy
        with strategy.init_model_context(), strategy.comm.phase("loading the model", local=True):
            model = self.load_model()
        # A model that is no actor takes the critic's place: on an actor a head named "score" would be a value head.
        actor, critic = (model, None) if is_actor(model) else (None, model)
        options = replace(strategy.options, critic_lr=self.config.lr)
        prepared = strategy.prepare_models_and_optimizers(
            actor, critic, None, None, options, self.config.schedule_length
        )
        trained: nn.Module = prepared[0][0] if actor is not None else prepared[1][0]
        return trained

    def load_policy(self, *, is_reference: bool) -> Policy:
        """A language model on this rank, not yet prepared. No loss here reads the entropy, so none is computed."""
        policy = load_policy(
            self.model_path,
            materialize=self.strategy.materializes_weights,
            trust_remote_code=self.config.trust_remote_code,
            is_reference=is_reference,
        )
        policy.entropy = False
        if not is_reference:
            add_adapters(policy.hf, self.config.lora, seed=self.config.seed)
        if self.strategy.materializes_weights and not is_reference:
            check_scores(policy, next(policy.parameters()).device)
        return policy

    # ---- A step ------------------------------------------------------------------------------------------------

    def take_step(self) -> StepReport:
        num_drawn = self.sampler.num_drawn
        drawn = self.sampler.next_batch()
        if self._end:
            drawn = drawn[: self._end - num_drawn]
        batch = [replace(self.examples[index], position=position) for position, index in enumerate(drawn)]
        mine = self._share(batch)
        # Not this rank's alone: ranks that split a model or its tokens run each other's micro-batches.
        examples = {example.position: example for example in batch}
        with self.watch.measure("time/learn"), self.strategy.comm.phase("learn"):
            result = self.strategy.train_batch(
                self.batches(mine),
                lambda output, pack: self.loss(output, pack, examples, self.statistics),
                self.weight,
                model=self.model,
            )
        # The same on every rank already; a mean over ranks leaves these as they are.
        self.statistics.mean("loss", result.loss, 1)
        self.statistics.mean("grad_norm", result.grad_norm, 1)
        self.statistics.highest("lr", result.lr)
        self.statistics.mean("skipped_updates", float(result.skipped), 1)
        self.statistics.highest("epoch", (num_drawn + len(drawn)) / len(self.examples))
        self._count_tokens(mine)
        return StepReport(metrics=self.statistics.reduce(self.strategy.comm))

    def _share(self, batch: Sequence[Example]) -> list[Example]:
        """This rank's examples: about as many tokens as any other's. Every rank knows the whole batch."""
        rank, world = self.strategy.comm.rank, self.strategy.comm.world
        owners = [place % world for place in range(len(batch))]
        ranks = assign_to_ranks([example.num_tokens for example in batch], owners, world)
        return [example for example, owner in zip(batch, ranks, strict=True) if owner == rank]

    def batches(self, mine: Sequence[Example]) -> list[PackedBatch]:
        """Micro-batches, the same number on every rank; a rank with fewer examples than that gets dummies."""
        comm = self.strategy.comm
        max_tokens = None if self.config.micro_batch_size else self.config.max_tokens_per_microbatch
        max_samples = self.config.micro_batch_size or None
        parts = split_micro_batches(mine, max_tokens=max_tokens, max_samples=max_samples)
        count = comm.max_int(max(1, len(parts)))
        if len(parts) < count:
            parts = split_micro_batches(mine, max_tokens=max_tokens, max_samples=max_samples, min_num=count)
        return [pack_examples(part, encode=self.encoder).to(self.strategy.device) for part in parts]

    def _count_tokens(self, mine: Sequence[Example]) -> None:
        answers = [answer for example in mine for answer in example.answers]
        trained = sum(sum(answer.loss_mask) for answer in answers)
        self.statistics.add("tokens/trained", trained)
        self.statistics.add("tokens/prompt", sum(answer.num_tokens for answer in answers) - trained)

    # ---- Around the steps --------------------------------------------------------------------------------------

    @property
    def eval_every(self) -> int:
        return self.config.eval.every

    def evaluate(self) -> dict[str, float]:
        """eval/loss and what the loss tells of its micro-batches, each over all eval examples at once."""
        if not self.eval_examples:
            return {}
        statistics, mine = Statistics(), self._share(self.eval_examples)
        examples = {example.position: example for example in self.eval_examples}
        with self.strategy.comm.phase("evaluation"):
            packs = self.batches(mine)
            for output, pack in zip(self.strategy.forward(packs, model=self.model), packs, strict=True):
                weight = float(self.weight(pack))
                statistics.mean("loss", float(self.loss(output, pack, examples, statistics)) * weight, weight)
        return {f"eval/{name}": value for name, value in statistics.reduce(self.strategy.comm).items()}

    def describe_batches(self) -> str:
        config, count, world = self.config, len(self.examples), self.strategy.comm.world
        per_rank = -(-config.batch_size // world)
        if config.micro_batch_size:
            micro = f"{-(-per_rank // config.micro_batch_size)} micro-batches of <= {config.micro_batch_size}"
        else:
            micro = f"micro-batches of <= {config.max_tokens_per_microbatch} tokens"
        num_drawn = self._end or config.max_steps * config.batch_size
        skipped = f" ({self.num_skipped} too long, left out)" if self.num_skipped else ""
        return (
            f"{count} examples{skipped}, {config.batch_size} a step, on each of {world} rank(s) about {per_rank} in "
            f"{micro}; {config.max_steps} steps, {num_drawn / count:.2f} epochs"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state["sampler"])
