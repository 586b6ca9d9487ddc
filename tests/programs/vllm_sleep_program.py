"""vLLM gives the same logprobs after each sleep, whatever was written to the memory meanwhile, and can be replaced.

python vllm_sleep_program.py DEVICE FAMILY FOLDER
"""

import sys

import torch
from tiny_engine_models import load_tiny_model

from lightrl.config import StrategyOptions
from lightrl.engines.base import SamplingParams, create_engine
from lightrl.engines.colocated import ColocatedEngine, clear_caches

PROMPTS = [[5, 9, 33], [7], [60, 2, 8, 41, 12, 3]]


def build(source, device):
    options = StrategyOptions(
        dtype="float32" if device.type == "cpu" else "bfloat16",
        engine_mem_fraction=0.2,
        engine_sleep_level=2,
        engine_args=("max_num_seqs=8",),
    )
    return ColocatedEngine(create_engine("vllm", source=source, tokenizer=None, options=options, device=device))


def logprobs(engine):
    params = [SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)] * len(PROMPTS)
    return torch.tensor([item.logprobs for item in engine.generate(PROMPTS, params)])


def scribble(device) -> None:
    """Writes to most of the memory that is free, some of which the engine gets back."""
    clear_caches()
    size = torch.cuda.mem_get_info(device)[0] * 3 // 4 if device.type == "cuda" else 1 << 20
    torch.empty(size, dtype=torch.uint8, device=device).fill_(0x7F)
    clear_caches()


def main(device_name, family, folder) -> None:
    device = torch.device(device_name)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
    source = load_tiny_model(family, folder).to(device)
    weights = {name: tensor.detach() for name, tensor in source.named_parameters()}
    if device.type == "cuda":
        weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for _ in range(2):  # the second engine takes the place of one that slept when it ended
        engine = build(source, device)
        engine.update_weights(weights.items(), 0)
        expected = logprobs(engine)
        for level in (1, 2, 1, 2):
            freed = engine.sleep(level)
            assert freed > 0
            scribble(device)
            if level == 2:
                engine.update_weights(weights.items(), 0)
            engine.wake()
            torch.testing.assert_close(logprobs(engine), expected, atol=1e-3, rtol=0)
        engine.sleep(2)
        engine.close()
        scribble(device)
    print("all checked")


main(*sys.argv[1:])
