"""examples/smollm2.py makes a folder of transformers from a file of llama.cpp, here of a small random model."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from loaded_file import load_file

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2.py"
HIDDEN, HEADS, LAYERS = 16, 2, 1
TOKENS = ["<unk>", "<|im_start|>", "<|im_end|>", "a", "b", "ab"]


@pytest.fixture
def example() -> ModuleType:
    return load_file(EXAMPLE)


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """Writes a random Llama of one layer with a vocabulary of six; returns its matrices under the file's names."""
    gguf = pytest.importorskip("gguf", reason="gguf reads files of llama.cpp")
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN, HIDDEN),
        "blk.0.attn_v": (HIDDEN, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (32, HIDDEN),
        "blk.0.ffn_up": (32, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, 32),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "output_norm": (HIDDEN,),
    }
    tensors = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(32)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b"])
    writer.add_token_types([1, 3, 3, 1, 1, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_the_folder_has_the_weights_and_the_tokenizer_of_the_file(example: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tensors = write_gguf(tmp_path / "small.gguf")
    example.convert(tmp_path / "small.gguf", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert not hasattr(model.config, "quantization_config")
    weights = model.state_dict()
    layer = "model.layers.0."
    for name, other in (
        ("token_embd", "model.embed_tokens"),
        ("blk.0.attn_v", f"{layer}self_attn.v_proj"),
        ("blk.0.ffn_down", f"{layer}mlp.down_proj"),
        ("output_norm", "model.norm"),
    ):
        assert torch.equal(weights[f"{other}.weight"], torch.from_numpy(tensors[name]))
    # llama.cpp interleaves the two halves of each head of queries and keys, [heads, dim / 2, 2].
    queries = tensors["blk.0.attn_q"].reshape(HEADS, HIDDEN // HEADS // 2, 2, HIDDEN).swapaxes(1, 2)
    assert torch.equal(weights[f"{layer}self_attn.q_proj.weight"], torch.from_numpy(queries.reshape(HIDDEN, HIDDEN)))
    assert (model.config.eos_token_id, model.config.bos_token_id) == (2, 1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer("ab")["input_ids"] == [5]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
