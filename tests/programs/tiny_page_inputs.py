"""Makes what the commands of the pages name and no repository has: models of the hub, data and code of the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_vlm
import torch
import transformers
from PIL import Image

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}({{ message.role }}){{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)
_SIZES: dict[str, Any] = {
    "vocab_size": tiny_vlm.VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
SUMS = [(12, 7), (30, 5), (8, 41), (9, 9), (25, 60), (3, 14), (77, 2), (50, 31)]
MODULES = {
    "my_rewards.py": """
def my_reward(sample):
    return float(sample.text.strip() == str(sample.prompt.answer))
""",
    "my_tools.py": '''
def multiply(a: int, b: int) -> int:
    """
    Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    return a * b


async def search(query: str) -> str:
    """
    Looks something up.

    Args:
        query: what to look for
    """
    return "nothing"
''',
    "my_pkg/my_module.py": """
from lightrl.engines.native.engine import build_native_engine as MyEngine
""",
}


def save_named_model(name: str, folder: Path) -> Path:
    """Saves a random model of the family that a name of the hub belongs to, which reads every printable character."""
    if "VL" in name:
        tiny_vlm.save_tiny_vlm(folder, "qwen2_5_vl")
        return folder
    if "A3B" in name:
        config: Any = transformers.Qwen3MoeConfig(**_SIZES, head_dim=32, **_EXPERTS)
    elif "Qwen2.5" in name:
        config = transformers.Qwen2Config(**_SIZES)
    else:
        config = transformers.Qwen3Config(**_SIZES, head_dim=32)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tiny_vlm.tiny_tokenizer(TEMPLATE).save_pretrained(folder)
    return folder


def write_inputs(folder: Path, *, with_images: bool) -> None:
    """Writes the data sets and modules that the pages name."""
    import datasets

    problems: list[dict[str, Any]] = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in SUMS]
    if with_images:
        Image.new("RGB", (60, 90), "red").save(folder / "red.png")
        parts = [{"type": "image"}, {"type": "text", "text": "Which color?"}]
        problems[0] = {"messages": [{"role": "user", "content": parts}], "images": ["red.png"], "answer": "red"}
    chats = [
        {"messages": [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": str(a + b)}]}
        for a, b in SUMS
    ]
    sources = ("openai/gsm8k", "lighteval/MATH", "apps")
    mixed = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": sources[i % 3], "tests": ["assert double(2) == 4"]}
        for i, (a, b) in enumerate(SUMS)
    ]
    answers = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in SUMS]
    data = {
        "train": problems,
        "test": problems[:3],
        "problems": problems,
        "chats": chats,
        "answers": answers,
        "held-out": answers[:3],
        "mixed": mixed,
    }
    for name, lines in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a, b in SUMS]
    datasets.Dataset.from_list(pairs).to_parquet(folder / "pairs.parquet")
    for name, code in MODULES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(code)
