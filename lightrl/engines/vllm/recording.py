"""vLLM for --routing.replay: it returns the experts of each token in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lightrl.engines.base import Completion, EngineGroup
from lightrl.engines.vllm.build import build_vllm_engine
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.models.routing import routers_of


class RecordingVLLMEngine(VLLMEngine):
    """Engine that takes the experts from vLLM's own records, which have a row for every layer, even dense ones."""

    returns_routing = True

    def __init__(self, arguments: dict[str, Any], **settings: Any) -> None:
        self._layers = [router.layer for router in routers_of(settings["source"])]
        super().__init__({**arguments, "enable_return_routed_experts": True}, **settings)

    def _take(self, output: Any) -> Iterator[Completion]:
        for done in super()._take(output):
            (new,) = output.outputs
            yield replace(done, routing=self._routing(new.routed_experts, done))

    def _routing(self, experts: Any, done: Completion) -> Any:
        num_tokens = len(done.prompt_token_ids) + len(done.output_token_ids)
        if experts is None or not num_tokens - 1 <= len(experts) <= num_tokens:
            rows = "none" if experts is None else len(experts)
            raise RuntimeError(
                f"vLLM returned experts of {rows} tokens for a sample of {num_tokens}. Leave --routing.replay out, or "
                "use --engine native."
            )
        return np.asarray(experts)[: num_tokens - 1, self._layers].astype(np.int16)


def build_recording_engine(*, device: torch.device, group: EngineGroup, **parts: Any) -> VLLMEngine:
    """Makes the engine; raises ValueError if vLLM cannot return experts."""
    if device.type == "cpu":
        raise ValueError(
            "--routing.replay True needs the experts that the engine chose. vLLM returns them on a GPU alone, since "
            "its code for that needs Triton. Use --engine native."
        )
    if group.size > 1:
        raise ValueError(
            f"--routing.replay True with --engine vllm needs --engine_tp_size 1, not {group.size}: vLLM returns the "
            "experts to one rank of a group."
        )
    return build_vllm_engine(device=device, group=group, kind=RecordingVLLMEngine, **parts)
