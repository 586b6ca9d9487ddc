"""Every knob, once. The dataclasses are the flags, the --help, the YAML keys and the file saved with the run.

Imports no torch: a mistake on the command line is told before anything slow is loaded.
"""

from lightrl.config.offline import DPOConfig, OfflineConfig, RMConfig, SFTConfig
from lightrl.config.parsing import (
    as_dict,
    exit_with_user_error,
    option_names,
    parse_config,
    tell_user_error,
    to_yaml,
)
from lightrl.config.runs import BUILTIN_MODEL, GRPOConfig, RolloutConfig, RunConfig, describe_batches
from lightrl.config.sections import (
    AlgorithmConfig,
    CheckpointConfig,
    DataConfig,
    DeepSpeedConfig,
    DistributedConfig,
    EvalConfig,
    ExampleDataConfig,
    ExampleEvalConfig,
    FSDPConfig,
    LogConfig,
    MarginPairDataConfig,
    NativeEngineConfig,
    OptimConfig,
    PairDataConfig,
    ResponseDataConfig,
    RolloutLogConfig,
    check_deepspeed,
)
from lightrl.config.strategy_options import StrategyOptions
from lightrl.config.values import engine_arguments, named_values, nearest_multiples, nearest_name

__all__ = [
    "BUILTIN_MODEL",
    "AlgorithmConfig",
    "CheckpointConfig",
    "DPOConfig",
    "DataConfig",
    "DeepSpeedConfig",
    "DistributedConfig",
    "EvalConfig",
    "ExampleDataConfig",
    "ExampleEvalConfig",
    "FSDPConfig",
    "GRPOConfig",
    "LogConfig",
    "MarginPairDataConfig",
    "NativeEngineConfig",
    "OfflineConfig",
    "OptimConfig",
    "PairDataConfig",
    "RMConfig",
    "ResponseDataConfig",
    "RolloutConfig",
    "RolloutLogConfig",
    "RunConfig",
    "SFTConfig",
    "StrategyOptions",
    "as_dict",
    "check_deepspeed",
    "describe_batches",
    "engine_arguments",
    "exit_with_user_error",
    "named_values",
    "nearest_multiples",
    "nearest_name",
    "option_names",
    "parse_config",
    "tell_user_error",
    "to_yaml",
]
