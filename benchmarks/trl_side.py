"""TRL's GRPOTrainer with the default settings of lightrl, for the benchmarks that compare the two.

Both use one process, float32, the same model folder, prompts and order of prompts, one update per step, token-mean
loss, clip 0.2, group-normalised advantages, no KL, fused AdamW, constant learning rate, norm clipped at 1, no decay, no
logging service, no checkpoint.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.data.sampler import PromptSampler


def trl_trainer(
    model: str,
    records: Sequence[dict[str, Any]],
    reward: Callable[..., list[float]],
    callback: Any,
    *,
    num_steps: int,
    num_prompts: int,
    group_size: int,
    max_new_tokens: int,
    lr: float,
    num_ranks: int = 1,
    seed: int = 0,
) -> Any:
    """Returns a trainer that takes the records in lightrl's order; reward gets lists named as the records' fields."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    sampler = PromptSampler(len(records), num_prompts, seed)
    order = [index for _ in range(num_steps) for index in sampler.next_batch()]
    settings: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": num_prompts * group_size // num_ranks,
        "num_generations": group_size,
        "max_completion_length": max_new_tokens,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "beta": 0.0,
        "num_iterations": 1,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "learning_rate": lr,
        "seed": seed,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
        "optim": "adamw_torch_fused",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "shuffle_dataset": False,
        "max_steps": num_steps,
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list([records[index] for index in order]),
        processing_class=AutoTokenizer.from_pretrained(model),
        callbacks=[callback],
    )
