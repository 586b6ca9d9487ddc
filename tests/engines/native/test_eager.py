import torch

from lightrl.config import NativeEngineConfig
from lightrl.engines.native.eager import EagerEngine
from lightrl.engines.native.engine import NativeEngine
from lightrl.engines.native.kinds import kind_of


def test_the_option_chooses_it(tiny_model):
    make = kind_of(NativeEngineConfig(cuda_graphs=False), tiny_model("qwen3"))
    engine = make(tiny_model("qwen3"), eos_token_ids=[7], device=torch.device("cpu"))
    assert isinstance(engine, EagerEngine)
    assert not engine._runner.replays_steps
    assert NativeEngine.make_runner.replays_steps
