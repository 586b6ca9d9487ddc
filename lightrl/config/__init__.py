"""Every knob, once. The dataclasses are the flags, the --help, the YAML keys and the file saved with the run.

Imports no torch: a mistake on the command line is told before anything slow is loaded.
"""

from lightrl.config.parsing import (
    as_dict,
    exit_with_user_error,
    option_names,
    parse_config,
    tell_user_error,
    to_yaml,
)
from lightrl.config.runs import BUILTIN_MODEL, GRPOConfig, PPOConfig, RolloutConfig, RunConfig, describe_batches
from lightrl.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    DeepSpeedConfig,
    DistillationConfig,
    DistributedConfig,
    DynamicSamplingConfig,
    EvalConfig,
    FSDPConfig,
    JudgeConfig,
    LogConfig,
    LoraConfig,
    NativeEngineConfig,
    OptimConfig,
    OverlongConfig,
    PPOAlgorithmConfig,
    check_deepspeed,
    lr_scales,
)
from lightrl.config.strategy_options import StrategyOptions
from lightrl.config.values import engine_arguments, named_values, nearest_multiples, nearest_name

__all__ = [
    "BUILTIN_MODEL",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "DeepSpeedConfig",
    "DistillationConfig",
    "DistributedConfig",
    "DynamicSamplingConfig",
    "EvalConfig",
    "FSDPConfig",
    "GRPOConfig",
    "JudgeConfig",
    "LogConfig",
    "LoraConfig",
    "NativeEngineConfig",
    "OptimConfig",
    "OverlongConfig",
    "PPOAlgorithmConfig",
    "PPOConfig",
    "RolloutConfig",
    "RunConfig",
    "StrategyOptions",
    "as_dict",
    "check_deepspeed",
    "describe_batches",
    "engine_arguments",
    "exit_with_user_error",
    "lr_scales",
    "named_values",
    "nearest_multiples",
    "nearest_name",
    "option_names",
    "parse_config",
    "tell_user_error",
    "to_yaml",
]
