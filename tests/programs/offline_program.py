"""Runs SFT, RM and DPO under one strategy after another; a JSON file holds the options."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lightrl.config import DeepSpeedConfig, DPOConfig, ExampleEvalConfig, LoraConfig, OptimConfig, RMConfig, SFTConfig
from lightrl.config.reference_section import ReferenceConfig
from lightrl.trainers.dpo import DPOTrainer
from lightrl.trainers.reward_model import RMTrainer
from lightrl.trainers.sft import SFTTrainer

KINDS: dict[str, tuple[Any, Any]] = {
    "sft": (SFTConfig, SFTTrainer),
    "rm": (RMConfig, RMTrainer),
    "dpo": (DPOConfig, DPOTrainer),
}


def fit(kind: str, options: dict[str, Any]) -> Any:
    config_class, trainer_class = KINDS[kind]
    sections: dict[str, Any] = {
        "optim": OptimConfig,
        "deepspeed": DeepSpeedConfig,
        "lora": LoraConfig,
        "reference": ReferenceConfig,
    }
    sections |= {"eval": ExampleEvalConfig}
    built = {name: sections[name](**value) if name in sections else value for name, value in options.items()}
    trainer = trainer_class(config_class(**built))
    trainer.fit()
    return trainer


if __name__ == "__main__":
    for run in json.loads(Path(sys.argv[1]).read_text()):
        last = fit(run["kind"], run["options"])  # each of them joins the process group that the first one made
    last.close()
    print("all done")
