"""Our names for options of TRL, verl and OpenRLHF, told to a user who gives theirs; docs/coming_from.md has all.

Some sampling options have none: training cannot do what they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_OURS = {
    "actor_learning_rate": "--lr",
    "adam_offload": "--deepspeed.offload_optimizer",
    "advantage_estimator": "--algorithm.advantage (group_norm is grpo, reinforce is reinforce_plus_plus)",
    "agent_func_path": "--rollout.workflow",
    "apply_chat_template": "--data.chat_template always",
    "async_queue_size": "--rollout.max_staleness (with --rollout_ranks)",
    "async_train": "--rollout_ranks with --rollout.max_staleness",
    "beta": "--algorithm.kl_coef",
    "bf16": "--dtype bfloat16",
    "chat_template_path": "--data.chat_template_file",
    "colocate_all_models": "--rollout_ranks 0 (the default)",
    "dataset_name": "--train_data hf:OWNER/NAME",
    "delta": "--algorithm.loss_args dual_clip=...",
    "ds_tensor_parallel_size": "--tp_size with --strategy fsdp",
    "dynamic_filtering": "--dynamic_sampling.enabled True",
    "enable_vllm_is_correction": "--algorithm.correction tis",
    "eps_clip": "--algorithm.clip_low and --algorithm.clip_high",
    "eps_clip_low_high": "--algorithm.clip_low and --algorithm.clip_high",
    "environment_factory": "--rollout.workflow",
    "epsilon": "--algorithm.clip_low",
    "epsilon_high": "--algorithm.clip_high",
    "eval_steps": "--eval.every",
    "freeze_vision_tower": "--optim.lr_scales visual=0",
    "generate_max_len": "--max_new_tokens",
    "generation_batch_size": "--num_prompts times --group_size",
    "gradient_accumulation_steps": "--num_minibatches (steps_per_generation / gradient_accumulation_steps)",
    "greater_is_better": "--eval.best NAME:min or NAME:max",
    "hub_model_id": "--hub.push",
    "importance_sampling_level": "--algorithm.loss gspo (for sequence)",
    "init_kl_coef": "--algorithm.kl_coef (in the loss; PPO can have it in the reward)",
    "input_key": "--data.prompt_field",
    "kl_estimator": "--algorithm.kl_estimator",
    "kl_target": "--algorithm.kl_target",
    "label_key": "--data.answer_field",
    "learning_rate": "--lr",
    "load_checkpoint": "--output_dir (the same folder continues its run)",
    "load_best_model_at_end": "--eval.best (it keeps the model in best/)",
    "log_completions": "--log.samples_per_step",
    "lora_alpha": "--lora.alpha",
    "lora_r": "--lora.rank",
    "lora_rank": "--lora.rank",
    "lora_target_modules": "--lora.target_modules",
    "loss_type": "--algorithm.aggregation (for cispo and sapo --algorithm.loss)",
    "lr_scheduler_type": "--optim.schedule",
    "mask_truncated_completions": "--overlong.mask_truncated True",
    "max_ckpt_num": "--checkpoint.keep",
    "max_completion_length": "--max_new_tokens",
    "max_epochs": "--num_epochs",
    "max_grad_norm": "--optim.max_norm",
    "metric_for_best_model": "--eval.best",
    "micro_rollout_batch_size": "--micro_batch_size",
    "micro_train_batch_size": "--micro_batch_size",
    "model_name_or_path": "--model",
    "multi_objective_aggregation": "--algorithm.advantage gdpo (for normalize_then_sum)",
    "n_samples_per_prompt": "--group_size",
    "num_generations": "--group_size",
    "num_generations_eval": "--eval.n",
    "num_iterations": "--num_epochs",
    "num_train_epochs": "--max_steps (records / num_prompts for each epoch)",
    "off_policy_mask_threshold": "--algorithm.off_policy_mask",
    "peft_config": "--lora.rank and --lora.target_modules",
    "per_device_train_batch_size": "--num_prompts times --group_size, over all ranks, or --micro_batch_size for memory",
    "pretrain": "--model",
    "prompt_data": "--train_data",
    "push_to_hub": "--hub.push me/my-model",
    "ref_model_mixup_alpha": "--reference.mixup",
    "ref_model_sync_steps": "--reference.sync_every",
    "remote_rm_url": "--reward file.py:name",
    "report_to": "--log.to",
    "resume_from_checkpoint": "--output_dir (the same folder continues its run)",
    "reward_funcs": "--reward",
    "reward_pretrain": "--reward reward_model --reward_model FOLDER",
    "reward_weights": "--reward a=1 b=0.5",
    "ring_attn_size": "--sp_size",
    "rollout_batch_size": "--num_prompts",
    "rollout_func": "--rollout.workflow",
    "save_steps": "--checkpoint.every",
    "save_total_limit": "--checkpoint.keep",
    "scale_rewards": "--algorithm.advantage (dr_grpo for none)",
    "steps_per_generation": "--num_minibatches (steps_per_generation / gradient_accumulation_steps)",
    "sync_ref_model": "--reference.sync_every",
    "tools": "--rollout.workflow tools",
    "top_entropy_quantile": "--algorithm.entropy_fraction",
    "train_batch_size": "--num_minibatches (samples of a step / samples of an update)",
    "train_max_tokens_per_gpu": "--max_tokens_per_microbatch",
    "use_bias_correction_kl": "--algorithm.kl_weighted True --algorithm.kl_gradient kl",
    "use_dynamic_batch": "--max_tokens_per_microbatch (always on)",
    "use_kl_loss": "--algorithm.kl_coef (always in the loss of GRPO)",
    "use_peft": "--lora.rank",
    "use_vllm": "--engine vllm",
    "vllm_enable_sleep": "--engine_sleep_level (on by default)",
    "vllm_enable_sleep_mode": "--engine_sleep_level (on by default)",
    "vllm_gpu_memory_utilization": "--engine_mem_fraction",
    "vllm_importance_sampling_correction": "--algorithm.correction tis",
    "vllm_mode": "--engine vllm (for server: --rollout_ranks)",
    "vllm_num_engines": "--engine_tp_size (there is one engine for each group of ranks)",
    "vllm_tensor_parallel_size": "--engine_tp_size",
    "warmup_ratio": "--optim.warmup_ratio",
    "warmup_steps": "--optim.warmup_steps",
    "weight_decay": "--optim.weight_decay",
    "zero_stage": "--deepspeed.zero_stage",
}

_VERL = {  # without actor_rollout_ref. in front
    "actor.clip_ratio_c": "--algorithm.loss_args dual_clip=...",
    "actor.clip_ratio_high": "--algorithm.clip_high",
    "actor.clip_ratio_low": "--algorithm.clip_low",
    "actor.entropy_coeff": "--algorithm.entropy_coef",
    "actor.fsdp_config.optimizer_offload": "--fsdp.cpu_offload or --offload_while_generating",
    "actor.fsdp_config.param_offload": "--offload_while_generating or --fsdp.cpu_offload",
    "actor.grad_clip": "--optim.max_norm",
    "actor.kl_loss_coef": "--algorithm.kl_coef",
    "actor.kl_loss_type": "--algorithm.kl_estimator (low_var_kl is k3, mse is k2, kl is k1)",
    "actor.loss_agg_mode": "--algorithm.aggregation (token-mean is token_mean, the default)",
    "actor.optim.lr": "--lr",
    "actor.ppo_epochs": "--num_epochs",
    "actor.ppo_max_token_len_per_gpu": "--max_tokens_per_microbatch",
    "actor.ppo_micro_batch_size_per_gpu": "--micro_batch_size",
    "actor.ppo_mini_batch_size": "--num_minibatches (prompts of a step / prompts of an update)",
    "actor.strategy": "--strategy",
    "actor.ulysses_sequence_parallel_size": "--sp_size",
    "actor.use_dynamic_bsz": "--max_tokens_per_microbatch (always on)",
    "actor.use_kl_loss": "--algorithm.kl_coef (always in the loss of GRPO)",
    "algorithm.adv_estimator": "--algorithm.advantage",
    "algorithm.filter_groups.enable": "--dynamic_sampling.enabled",
    "algorithm.filter_groups.metric": "--dynamic_sampling.reward",
    "algorithm.gamma": "--algorithm.advantage_args gamma=...",
    "algorithm.kl_ctrl.kl_coef": "--algorithm.kl_coef",
    "algorithm.lam": "--algorithm.advantage_args lam=...",
    "algorithm.norm_adv_by_std_in_grpo": "--algorithm.advantage (dr_grpo for False)",
    "algorithm.use_kl_in_reward": "--algorithm.kl_in_reward k1",
    "critic.model.path": "--critic_model",
    "critic.optim.lr": "--critic_lr",
    "custom_reward_function.name": "--reward path/to/file.py:name",
    "custom_reward_function.path": "--reward path/to/file.py:name",
    "data.filter_overlong_prompts": "--data.too_long skip",
    "data.max_prompt_length": "--data.too_long (there is no other limit than the model's context)",
    "data.max_response_length": "--max_new_tokens",
    "data.prompt_key": "--data.prompt_field",
    "data.train_batch_size": "--num_prompts",
    "data.train_files": "--train_data",
    "data.val_files": "--eval_data",
    "model.enable_gradient_checkpointing": "--gradient_checkpointing",
    "model.lora_alpha": "--lora.alpha",
    "model.lora_rank": "--lora.rank",
    "model.path": "--model",
    "reward_model.overlong_buffer.len": "--overlong.buffer",
    "rollout.free_cache_engine": "--engine_sleep_level",
    "rollout.gpu_memory_utilization": "--engine_mem_fraction",
    "rollout.multi_turn.enable": "--rollout.workflow",
    "rollout.n": "--group_size",
    "rollout.name": "--engine",
    "rollout.temperature": "--temperature",
    "rollout.tensor_model_parallel_size": "--engine_tp_size",
    "rollout.val_kwargs.n": "--eval.n",
    "trainer.critic_warmup": "--critic.policy_frozen_steps",
    "trainer.default_local_dir": "--output_dir",
    "trainer.logger": "--log.to",
    "trainer.save_freq": "--checkpoint.every",
    "trainer.test_freq": "--eval.every",
    "trainer.total_epochs": "--max_steps (records / num_prompts for each epoch)",
    "trainer.total_training_steps": "--max_steps",
}
_OFFLINE = {  # in SFT, reward-model and DPO training, where the names differ from those of GRPO
    "assistant_only_loss": "--data.train_on all (the default)",
    "center_rewards_coefficient": "--centring_coef",
    "chosen_key": "--data.chosen_field",
    "gradient_accumulation_steps": "--batch_size (times per_device_train_batch_size and the number of processes)",
    "ipo": "--loss ipo",
    "loss_type": "--loss (for sigmoid_norm --length_normalized True, for sft --nll_coef)",
    "loss_weights": "--nll_coef",
    "max_len": "--data.max_tokens",
    "max_length": "--data.max_tokens (a longer line is an error, or left out with --data.too_long skip)",
    "nll_loss_coef": "--nll_coef",
    "num_train_epochs": "--num_epochs",
    "per_device_train_batch_size": "--batch_size (times gradient_accumulation_steps and the number of processes)",
    "rejected_key": "--data.rejected_field",
    "train_batch_size": "--batch_size",
}
_OF_EVALUATION = {  # sampling options that training lacks: what they are called in an evaluation
    "min_p": "",  # no engine setting of ours
    "min_tokens": "min_new_tokens",
    "min_new_tokens": "min_new_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
}

_NAME = re.compile(r"--(?P<flag>[\w.-]+)|\+*(?P<key>\w+(\.\w+)+)=")  # of verl's command line, a.b=value


def own_names(args: Iterable[str], known: Collection[str]) -> list[str]:
    """Returns a sentence for each option of a command line that another trainer has, and whose own name is known."""
    matches = [match for arg in args if (match := _NAME.match(arg)) is not None]
    names = [(match["flag"] or match["key"]).replace("-", "_") for match in matches]
    table = {**_OURS, **_VERL, **(_OFFLINE if "batch_size" in known else {})}
    ours = {name: table.get(name.removeprefix("actor_rollout_ref."), "") for name in names}
    return [
        f"{name if '.' in name else f'--{name}'} is {ours[name]} here."
        for name in names
        if name not in known and ours[name].partition(" ")[0].removeprefix("--") in known
    ]


def reason_against(name: str, known: Collection[str]) -> str:
    """Returns why training has no option of this name and what to do, or an empty text for any other name."""
    last = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    if last not in _OF_EVALUATION or "eval.top_p" not in known:
        return ""
    own = _OF_EVALUATION[last]
    advice = f"For evaluation there is --eval.{own}." if own else "Leave it out."
    return (
        f"Training has no {last}: a trainer computes log-probabilities at --temperature alone, and tokens that are "
        f"drawn in another way have others. {advice}"
    )
