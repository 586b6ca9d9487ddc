"""Compares forward and backward of a padded batch with the same samples packed without padding.

    python benchmarks/packing.py [--model toy|mid --num 32 --threads 2 --rounds 5]

Lengths are log-normal, like those of sampled responses, and the two take turns. Both score the same response tokens
with the same loss, and the largest difference of a log-probability is printed with the times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from decode import SHAPES, random_model
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.data.packing import pack
from lightrl.models.policy import Policy
from lightrl.records import Experience, PackedBatch, Prompt, Sample

PROMPT_LENGTH = 16


def make_samples(num: int, vocab_size: int) -> list[Experience]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(num).log_normal_(5.1, 0.7, generator=generator).clamp(PROMPT_LENGTH + 1, 506).long()
    return [make_sample(place, int(length), vocab_size, generator) for place, length in enumerate(lengths)]


def make_sample(position: int, length: int, vocab_size: int, generator: torch.Generator) -> Experience:
    ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
    response = tuple(ids[PROMPT_LENGTH:])
    sample = Sample(
        prompt=Prompt(index=position, text="", token_ids=tuple(ids[:PROMPT_LENGTH])),
        position=position,
        sample_index=0,
        response_ids=response,
        sampler_logprobs=(0.0,) * len(response),
        versions=(0,) * len(response),
        finish_reason="stop",
        text="",
    )
    return Experience(sample=sample, reward=0.0, advantage=1.0)


def padded_logprobs(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Scores the pack's response tokens with one right-padded batch and the full log-softmax."""
    bounds = torch.tensor(batch.cu_seqlens)
    rows = torch.bucketize(torch.arange(batch.cu_seqlens[-1]), bounds[1:], right=True)
    ids = torch.zeros(len(batch.keys), int(bounds.diff().max()), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    ids[rows, batch.position_ids] = batch.input_ids
    mask[rows, batch.position_ids] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    logprobs = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    scores: Tensor = logprobs[rows[batch.score_index], batch.position_ids[batch.score_index]]
    return scores


def timed(model: torch.nn.Module, score: Callable[[], Tensor]) -> tuple[float, float]:
    """Returns the seconds and CPU seconds of a forward and a backward."""
    model.zero_grad()
    wall, cpu = time.perf_counter(), time.process_time()
    (-score().mean()).backward()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        choices=sorted(SHAPES),
        default="toy",
        help="random model: toy has 0.8 and mid 42 million parameters (default: %(default)s)",
    )
    parser.add_argument("--num", type=int, default=32, help="samples of the batch (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="threads of the process (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each side, of which the median counts (default: %(default)s)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    padded, policy = random_model(args.model).train(), Policy(random_model(args.model).train(), entropy=False)
    samples = make_samples(args.num, SHAPES[args.model]["vocab_size"])
    batch = pack(samples, temperature=1.0, old_logprobs=None, ref_logprobs=None)
    scorers: dict[str, Callable[[], Tensor]] = {
        "padded": lambda: padded_logprobs(padded, batch),
        "packed": lambda: policy(batch).logprobs,
    }
    with torch.no_grad():
        difference = (scorers["padded"]() - scorers["packed"]()).abs().max().item()
    models = {"padded": padded, "packed": policy}
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in scorers}
    for _ in range(args.rounds):
        for way, score in scorers.items():
            runs[way].append(timed(models[way], score))
    wall, cpu = ({way: statistics.median(run[i] for run in rs) for way, rs in runs.items()} for i in (0, 1))
    lengths = [item.num_tokens for item in samples]
    mean, longest = sum(lengths) / len(lengths), max(lengths)
    print(f"{args.model}: {args.num} samples, mean {mean:.0f}, max {longest} tokens, padding {1 - mean / longest:.0%}")
    print(f"largest difference of a log-probability {difference:.1e}")
    print(f"{'way':8}{'seconds':>10}{'CPU s':>10}{'speed-up':>10}{'in CPU s':>10}")
    for way in scorers:
        ratios = f"{wall['padded'] / wall[way]:10.2f}{cpu['padded'] / cpu[way]:10.2f}"
        print(f"{way:8}{wall[way]:10.3f}{cpu[way]:10.3f}{ratios}")


if __name__ == "__main__":
    main()
