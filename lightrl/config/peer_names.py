"""Our names for options of TRL, verl and OpenRLHF, told to a user who gives theirs; docs/coming_from.md has all."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_OURS = {
    "actor_learning_rate": "--lr",
    "adam_offload": "--deepspeed.offload_optimizer",
    "advantage_estimator": "--algorithm.advantage",
    "beta": "--algorithm.kl_coef",
    "chat_template_path": "--data.chat_template_file",
    "eps_clip": "--algorithm.clip_low and --algorithm.clip_high",
    "epsilon": "--algorithm.clip_low",
    "epsilon_high": "--algorithm.clip_high",
    "eval_steps": "--eval.every",
    "freeze_vision_tower": "--optim.lr_scales visual=0",
    "generate_max_len": "--max_new_tokens",
    "gradient_accumulation_steps": "--num_minibatches (micro-batches are cut by --max_tokens_per_microbatch)",
    "init_kl_coef": "--algorithm.kl_coef",
    "input_key": "--data.prompt_field",
    "label_key": "--data.answer_field",
    "learning_rate": "--lr",
    "log_completions": "--log.samples_per_step",
    "lora_alpha": "--lora.alpha",
    "lora_rank": "--lora.rank",
    "lr_scheduler_type": "--optim.schedule",
    "max_ckpt_num": "--checkpoint.keep",
    "max_completion_length": "--max_new_tokens",
    "max_epochs": "--num_epochs",
    "max_grad_norm": "--optim.max_norm",
    "micro_train_batch_size": "--micro_batch_size",
    "model_name_or_path": "--model",
    "n_samples_per_prompt": "--group_size",
    "num_generations": "--group_size",
    "num_iterations": "--num_epochs",
    "per_device_train_batch_size": "--num_prompts times --group_size, over all ranks, or --micro_batch_size for memory",
    "pretrain": "--model",
    "prompt_data": "--train_data",
    "reward_funcs": "--reward",
    "rollout_batch_size": "--num_prompts",
    "save_steps": "--checkpoint.every",
    "save_total_limit": "--checkpoint.keep",
    "use_vllm": "--engine vllm",
    "vllm_gpu_memory_utilization": "--engine_mem_fraction",
    "vllm_tensor_parallel_size": "--engine_tp_size",
    "warmup_ratio": "--optim.warmup_ratio",
    "weight_decay": "--optim.weight_decay",
    "zero_stage": "--deepspeed.zero_stage",
}


def own_names(args: Iterable[str], known: Collection[str]) -> list[str]:
    """Returns a sentence for each flag of a command line that another trainer has, and whose own name is known."""
    flags = [arg.partition("=")[0].removeprefix("--").replace("-", "_") for arg in args if arg.startswith("--")]
    return [
        f"--{flag} is {_OURS[flag]} here."
        for flag in flags
        if flag in _OURS and flag not in known and _OURS[flag].split()[0].removeprefix("--") in known
    ]
