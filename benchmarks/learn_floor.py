"""Compares the training half of a step with its floor: the step's products at the rate of one large product.

    python benchmarks/learn_floor.py [--models toy mid --threads 1 --rounds 7 --top 0]

toy: learning in a GRPO step of the built-in task, from 16 prompts x 16 samples of its model; mid: learning of 40 M
parameters from 8 samples of 64 + 64 tokens. The floor counts the products of all weights with all tokens, three times
for forward and backward, those of the head with the scored tokens, and those of attention. The rate is measured in turn
with the steps, in CPU seconds of the process. "shared" is the same with --share_prompts, relative to the same floor.
--top N lists the operations that took most time.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from lightrl.builtin.model import builtin_model_path
from lightrl.config import AlgorithmConfig, EvalConfig, GRPOConfig
from lightrl.data.packing import pack
from lightrl.metrics import Statistics
from lightrl.models.policy import Policy, load_policy
from lightrl.records import Experience, PackedBatch, Prompt, Sample
from lightrl.sharing.model import attach_sharing
from lightrl.sharing.tree import share
from lightrl.strategy import create_strategy
from lightrl.trainers.grpo import GRPOTrainer
from lightrl.trainers.objective import PolicyObjective

MID: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "head_dim": 64}
SIDE = 1024  # of the square product


def toy_samples() -> list[Experience]:
    """Returns what the built-in model answers to 16 sums, 16 times each."""
    config = GRPOConfig(strategy="single", output_dir=tempfile.mkdtemp(), eval=EvalConfig(every=0))
    trainer = GRPOTrainer(config)
    groups = trainer.score(trainer.sample(trainer.prompts.draw(config.num_prompts)))
    found = trainer.compute_advantages(groups)
    trainer.close()
    return found


def mid_samples() -> list[Experience]:
    draw = torch.Generator().manual_seed(0)

    def tokens() -> tuple[int, ...]:
        return tuple(torch.randint(32_000, (64,), generator=draw).tolist())

    prompt = tokens()
    return [sample(0, index, prompt, tokens()) for index in range(8)]


def sample(position: int, index: int, prompt: tuple[int, ...], response: tuple[int, ...]) -> Experience:
    made = Sample(
        prompt=Prompt(index=position, text="", token_ids=prompt),
        position=position,
        sample_index=index,
        response_ids=response,
        sampler_logprobs=(-1.0,) * len(response),
        versions=(0,) * len(response),
        finish_reason="stop",
        text="",
    )
    return Experience(sample=made, reward=0.0, advantage=float((-1) ** index))


def make_policy(name: str) -> Policy:
    torch.manual_seed(0)
    if name == "toy":
        return load_policy(str(builtin_model_path()), materialize=True)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.Qwen3Config(vocab_size=32_000, tie_word_embeddings=True, **MID, **heads)
    return Policy(transformers.AutoModelForCausalLM.from_config(config))


def floor_flops(policy: Policy, batch: PackedBatch) -> float:
    """Returns the operations of the products of forward and backward."""
    decoder: Any = policy.hf.get_decoder()
    config = decoder.config
    weights = sum(layer.weight.numel() for layer in decoder.modules() if isinstance(layer, torch.nn.Linear))
    head = policy.hf.get_output_embeddings().weight.numel()
    lengths = [end - start for start, end in itertools.pairwise(batch.cu_seqlens)]
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    width = config.num_attention_heads * config.head_dim
    attention = 2 * pairs * width * config.num_hidden_layers
    return 3 * 2 * (weights * batch.cu_seqlens[-1] + head * len(batch.targets) + attention)


class Learner:
    """Packs samples and takes an update on them."""

    def __init__(self, name: str, *, shares: bool) -> None:
        self.strategy = create_strategy(GRPOConfig(strategy="single"))
        self.strategy.setup_distributed()
        self.policy: Any = self.strategy.prepare_trained(make_policy(name)).model
        self.objective = PolicyObjective(AlgorithmConfig())
        self.samples = toy_samples() if name == "toy" else mid_samples()
        self.shares = shares
        if shares:
            attach_sharing(self.policy, self.strategy)

    def packed(self) -> PackedBatch:
        batch = pack(self.samples, temperature=1.0)
        return share(batch) if self.shares else batch

    def learn(self) -> None:
        statistics = Statistics()

        def loss(scores: Any, batch: PackedBatch) -> Tensor:
            return self.objective.loss(scores, batch, statistics)

        result = self.strategy.train_batch([self.packed()], loss, self.objective.weight, model=self.policy)
        assert not result.skipped


def cpu_seconds(run: Callable[[], Any], times: int = 1) -> float:
    begin = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - begin) / times


def show_top(learner: Learner, count: int) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            learner.learn()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=count, max_name_column_width=48))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=("toy", "mid"),
        default=["toy", "mid"],
        help="toy and mid, as above (default: both)",
    )
    parser.add_argument("--threads", type=int, default=1, help="threads of the process (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    parser.add_argument("--top", type=int, default=0, help="number of operations to list (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    square = torch.randn(SIDE, SIDE)
    print(f"{'model':7}{'GFLOP':>8}{'GFLOP/s':>9}{'floor s':>9}{'learn s':>9}{'ratio':>7}{'shared s':>10}{'ratio':>7}")
    for name in args.models:
        learners = [Learner(name, shares=shares) for shares in (False, True)]
        flops = floor_flops(learners[0].policy, learners[0].packed())
        rounds: list[tuple[float, ...]] = []
        for _ in range(args.rounds + 1):
            rate = 2 * SIDE**3 / cpu_seconds(lambda: square @ square, times=8)
            rounds.append((rate, *(cpu_seconds(learner.learn) for learner in learners)))
        rate, whole, shared = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        floor = flops / rate
        times = f"{floor:9.4f}{whole:9.4f}{whole / floor:7.2f}{shared:10.4f}{shared / floor:7.2f}"
        print(f"{name:7}{flops / 1e9:8.2f}{rate / 1e9:9.1f}{times}", flush=True)
        if args.top:
            show_top(learners[0], args.top)


if __name__ == "__main__":
    main()
