"""Compares the logprobs of the exact engine with those of the exact policy, as JSON: {name: largest difference}.

MODE: `exact` compares several families and runs of GRPO as a run has them, and then takes away one safeguard at a time;
`default` leaves out the setting of MKL.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from lightrl.builtin.model import tiny_model
from lightrl.config import AlgorithmConfig, GRPOConfig, LoraConfig
from lightrl.engines.base import SamplingParams
from lightrl.engines.native.sampler import sample
from lightrl.exact import attention, engine
from lightrl.exact.engine import ExactEngine
from lightrl.exact.environment import fix_arithmetic
from lightrl.exact.policy import make_exact
from lightrl.exact.run import exact
from lightrl.models.policy import Policy, response_batch
from lightrl.strategy.saving.state_files import HASH_FILE
from lightrl.trainers.grpo import GRPOTrainer

SIZES = {
    "vocab_size": 98,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "one head a group": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 4, "vocab_size": 5000}),
    "window": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "modules": lambda: transformers.GraniteConfig(**SIZES, logits_scaling=3.0, attention_multiplier=0.2),
}
PROMPTS = [[(i * 7 + j * 3) % 97 for j in range(length)] for i, length in enumerate((1, 2, 9, 20, 60))]


def made(family):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]())
    with torch.no_grad():
        for parameter in model.parameters():  # far from the uniform, where many logprobs would be alike
            parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def difference(family, *, temperature=0.8, prompts=PROMPTS, tokens=24, **params):
    """Returns the largest difference between logprobs of one engine and of packs of several sizes."""
    model = made(family)
    native = ExactEngine(copy.deepcopy(model), eos_token_ids=(), device=torch.device("cpu"), max_num_seqs=7)
    asked = [
        SamplingParams(max_new_tokens=tokens + 5 * i, n=2, seed=i, temperature=temperature, **params)
        for i in range(len(prompts))
    ]
    done = native.generate(prompts, asked)
    policy, largest = Policy(model), 0.0
    make_exact(policy)
    for size in (1, len(done)):
        for start in range(0, len(done), size):
            part = done[start : start + size]
            pairs = [(item.prompt_token_ids, item.output_token_ids) for item in part]
            with torch.no_grad():
                ours = policy(response_batch(pairs, temperature=temperature)).logprobs
            theirs = torch.tensor([logprob for item in part for logprob in item.logprobs])
            largest = max(largest, float((ours - theirs).abs().max()))
    return largest, native._runner.uses_fused_forward


def whole_runs():
    """Runs with old logprobs computed again and from the engine, and with an adapter."""
    folder = Path(tempfile.mkdtemp())
    model, tokenizer = tiny_model()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": f"{i}+{3 * i}=", "answer": f"{4 * i}"}) for i in range(1, 6)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text("def odd(sample):\n    return sum(c in '13579' for c in sample.text) / 8\n")
    found = {}
    for name, options in {
        "recompute": {},
        "engine": {"algorithm": AlgorithmConfig(old_logprobs="engine")},
        "adapter": {"lora": LoraConfig(rank=4)},
    }.items():
        config = GRPOConfig(
            exact=True,
            model=str(folder / "model"),
            train_data=str(folder / "train.jsonl"),
            reward=(f"{folder / 'reward.py'}:odd",),
            num_prompts=4,
            group_size=4,
            num_minibatches=2,
            max_steps=3,
            lr=1e-3,
            temperature=0.7,
            output_dir=str(folder / name),
            **options,
        )
        trainer = exact(GRPOTrainer)(config)
        trainer.fit()
        trainer.close()
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        found[f"run: {name}"] = max(row["mismatch/max_abs"] for row in rows if "mismatch/max_abs" in row)
    hashes = [(folder / name / "final" / HASH_FILE).read_text() for name in ("recompute", "engine")]
    return found, hashes[0] == hashes[1]


def flipped():
    """Returns the difference without each safeguard, each of which is put back afterwards."""
    found = {}
    long = [[(j * 5) % 97 for j in range(length)] for length in (470, 140)]
    block, attention.KEY_BLOCK = attention.KEY_BLOCK, 1 << 30
    found["keys are mixed in blocks"] = difference("llama", prompts=long)[0]
    attention.KEY_BLOCK = block
    least = attention.LEAST_KEYS
    attention.LEAST_KEYS, engine.ExactCache.least_read = 1, 8
    found["softmax has enough keys"] = difference("llama", prompts=[[5, 4, 3, 6, 9], [*range(5, 14)]])[0]
    attention.LEAST_KEYS, engine.ExactCache.least_read = least, least
    rows, attention.LEAST_ROWS = attention.LEAST_ROWS, 1
    found["products of attention have enough rows"] = difference("one head a group")[0]
    attention.LEAST_ROWS = rows
    ExactEngine.draw = staticmethod(sample)
    found["logprobs are summed alike"] = difference("llama")[0]
    ExactEngine.draw = staticmethod(engine.draw_exactly)
    rotate = engine.ExactForward.rotate
    engine.ExactForward.rotate = engine.FusedForward.rotate
    found["a fused forward that rounds otherwise is not used"] = float(not difference("llama")[1])
    engine.ExactForward.rotate = rotate
    found["all are put back"] = 1.0 - difference("llama")[0]
    return found


if __name__ == "__main__":
    mode = sys.argv[1]
    if mode != "default":
        fix_arithmetic()
    if mode == "exact":
        result = {name: difference(name) for name in FAMILIES}
        fused = sorted(name for name, (_, is_fused) in result.items() if is_fused)
        result = {name: largest for name, (largest, _) in result.items()}
        result["no temperature"] = difference("qwen3", temperature=1.0)[0]
        result["long"] = difference("llama", prompts=[[(j * 5) % 97 for j in range(470)]])[0]
        runs, is_same = whole_runs()
        result = {"largest": result | runs, "fused": fused, "same_hash": is_same, "without": flipped()}
        print("RESULT", json.dumps(result))
    else:
        # Of all families, since which products depend on the number of rows depends on the processor.
        print("RESULT", json.dumps(max(difference(name)[0] for name in FAMILIES)))
