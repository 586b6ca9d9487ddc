"""A loop of your own around a strategy: torchrun --nproc_per_node 2 examples/own_loop.py

Model, data and loss are plain transformers and PyTorch. The strategy places the model, reduces and clips gradients,
steps and saves. Every number of ranks that divides 16 gives the same losses, and a second start continues the first.
"""

import argparse

import torch
from torch.nn.functional import cross_entropy

from lightrl import SFTConfig, create_strategy
from lightrl.builtin.model import tiny_model
from lightrl.builtin.task import train_problems
from lightrl.config import OptimConfig


def main(config: SFTConfig) -> None:
    strategy = create_strategy(config)
    strategy.setup_distributed()

    model, tokenizer = tiny_model()  # or any torch module; rank 0's weights are the ones that count
    optimizer = strategy.create_optimizer(model)
    scheduler = strategy.build_lr_scheduler(optimizer, total_steps=config.max_steps)
    model, optimizer, scheduler = strategy.prepare((model, optimizer, scheduler))
    strategy.load_ckpt(model, config.output_dir)  # changes nothing if there is no checkpoint
    texts = [problem["prompt"] + problem["answer"] for problem in train_problems()]
    for step in range(strategy.global_step, config.max_steps):
        drawn = torch.randperm(len(texts), generator=torch.Generator().manual_seed(step))[:16]
        mine = [texts[index] for index in drawn[strategy.comm.rank :: strategy.comm.world]]
        pairs = [mine[i : i + 2] for i in range(0, len(mine), 2)]
        micro_batches = [tokenizer(pair, padding=True, padding_side="right", return_tensors="pt") for pair in pairs]
        # A weight is a micro-batch's share of all tokens of all ranks, so that every token counts the same.
        counts = [int(micro_batch["attention_mask"][:, 1:].sum()) for micro_batch in micro_batches]
        total, loss_sum = strategy.all_reduce(sum(counts), "sum"), 0.0
        for index, (micro_batch, count) in enumerate(zip(micro_batches, counts, strict=True)):
            with strategy.before_micro_batch(model, index == len(counts) - 1):  # the last one reduces gradients
                micro_batch.to(strategy.device)
                labels = micro_batch["input_ids"].masked_fill(micro_batch["attention_mask"] == 0, -100)
                logits = model(**micro_batch).logits[:, :-1]
                loss = cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
                strategy.backward(loss, model, optimizer, weight=count / total)
            loss_sum += float(loss.detach()) * count / total
        result = strategy.optimizer_step(optimizer, model, scheduler, is_boundary=True)
        strategy.set_global_step(step + 1)
        strategy.print(f"step {step + 1} loss {strategy.all_reduce(loss_sum, 'sum'):.9g} norm {result.grad_norm:.9g}")
    strategy.save_ckpt(model, config.output_dir)
    strategy.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--output_dir", default="runs/own_loop")
    try:
        config = SFTConfig(lr=1e-2, optim=OptimConfig(warmup_steps=2), **vars(parser.parse_args()))
    except ValueError as error:  # a number out of its range
        parser.error(str(error))
    main(config)
