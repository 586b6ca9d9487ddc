"""ForeignNames: the names of other trainers' strategy interfaces, one line each over lightrl's own.

Code written for those interfaces runs on a lightrl strategy; lightrl's own trainers need none of these names.
"""

from __future__ import annotations

from typing import Any

import torch
from easydict import EasyDict
from torch import nn
from torch.optim import Optimizer

from lightrl.config import StrategyOptions
from lightrl.engines.base import InferenceEngine
from lightrl.strategy.serving import foreign_inputs
from lightrl.strategy.serving.colocated_serving import ColocatedServing
from lightrl.strategy.serving.residency import Residency


class ForeignNames:
    """Mixin of StrategyBase that wraps what the strategy holds."""

    args: Any
    options: StrategyOptions
    device: torch.device
    tokenizer: foreign_inputs.Decoder | None
    serving: ColocatedServing
    residency: Residency

    # ---- Sampling ----------------------------------------------------------------------------------------------

    def setup_inference_engine(
        self, args: Any, engine_type: str = "vllm", actor: nn.Module | None = None
    ) -> InferenceEngine:
        """Builds the engine beside the trainer; with an actor it gets that actor's weights at once."""
        options = self.options if args is None or args is self.args else StrategyOptions.from_args(args)
        return self.serving.start(engine_type, model=actor, tokenizer=self.tokenizer, options=options)

    def engine_generate_local(
        self,
        sampling_params: Any,
        prompt_token_ids: Any | None = None,
        multi_modal_inputs: list[dict[str, Any]] | None = None,
    ) -> list[EasyDict]:
        """Runs this rank's engine on exactly one kind of input; returns n items per prompt, flattened in order."""
        return foreign_inputs.generate_local(
            self.serving, self.tokenizer, sampling_params, prompt_token_ids, multi_modal_inputs
        )

    def gather_and_generate(
        self,
        sampling_params: Any,
        all_prompt_token_ids: Any | None = None,
        all_prompts: list[str] | None = None,
        all_images: Any | None = None,
        sleep_engine: bool = True,
        images_num: list[int] | None = None,
        all_videos: Any | None = None,
        videos_num: list[int] | None = None,
    ) -> list[EasyDict]:
        """Samples this rank's prompts (any number, also none) on the engine that its group shares.

        Images and videos go with texts or with token ids that hold one placeholder for each. Shared sampling_params
        draw by the prompt's position among those of all ranks, so results do not depend on the world size; give one
        SamplingParams per prompt to set each seed. An error on one rank is raised on all.
        """
        return foreign_inputs.generate_gathered(
            self.serving,
            self.tokenizer,
            sampling_params,
            token_ids=all_prompt_token_ids,
            texts=all_prompts,
            media=(all_images, images_num, all_videos, videos_num),
            sleep_engine=sleep_engine,
        )

    @classmethod
    def _build_multimodal_inputs(
        cls, all_prompts: Any, all_images: Any, images_num: Any, all_videos: Any, videos_num: Any
    ) -> list[dict[str, Any]]:
        return foreign_inputs.build_multimodal_inputs(all_prompts, all_images, images_num, all_videos, videos_num)

    def update_engine_weights(self, actor: nn.Module) -> None:
        """Does what sync_weights does."""
        self.serving.sync_weights(actor)

    def maybe_sleep_inference_engine(self) -> None:
        """Does what sleep_engine does."""
        self.serving.sleep()

    def wakeup_inference_engine(self) -> None:
        """Does what wake_engine does."""
        self.serving.wake()

    # ---- Offload -----------------------------------------------------------------------------------------------

    def maybe_offload_optimizer(self, optimizer: Optimizer) -> int:
        """Moves the optimizer's states, and the average of the weights, to host memory; returns the bytes freed."""
        return self.residency.of_optimizer(optimizer).offload_optimizer()

    def maybe_load_optimizer(self, optimizer: Optimizer, device: torch.device | None = None) -> int:
        """Brings the states back to where they were; device may only name that place. Returns the bytes loaded."""
        if device is not None and torch.device(device).type != self.device.type:
            raise ValueError(f"Optimizer states live on {self.device}; they cannot be loaded to {device}.")
        return self.residency.of_optimizer(optimizer).load_optimizer()

    def offload_optimizer(self) -> int:
        """Moves all trained models' optimizer states to host memory; returns the bytes freed on this rank."""
        return self.residency.offload_optimizers()

    def load_optimizer(self, device_id: Any = None) -> int:
        """Brings all states back to the device they left, whatever device_id says; returns the bytes loaded."""
        return self.residency.load_optimizers()

    def offload_param_and_grad(self, offload_grad: bool = False) -> int:
        """Moves the trained models' weights, and with offload_grad the gradients, to host memory; returns the bytes."""
        return self.residency.offload_parameters(with_gradients=offload_grad)

    def load_param_and_grad(self, device_id: Any = None, load_grad: bool = False) -> int:
        """Brings the weights back, and with load_grad the gradients; without it offloaded gradients are dropped.

        They return to the device they left, whatever device_id says. Returns the bytes loaded on this rank.
        """
        return self.residency.load_parameters(keep_gradients=load_grad)
