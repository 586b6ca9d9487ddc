import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, FalconH1Config, LlamaConfig

from lightrl.models.buffers import compute_buffers

LONG = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def tiny(**options):
    config = LlamaConfig(
        vocab_size=9, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **options
    )
    return AutoModelForCausalLM.from_config(config)


def falcon():
    """Its multipliers are buffers of the mixers that the whole model computes."""
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    mixer = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}
    return AutoModelForCausalLM.from_config(FalconH1Config(**sizes, **mixer, ssm_multipliers=[0.3, 0.2, 0.4, 0.5, 0.6]))


@pytest.mark.parametrize(
    "make", [lambda: tiny(rope_parameters={**LONG, "original_max_position_embeddings": 64}), falcon]
)
def test_buffers_follow_from_the_configuration(make):
    expected = dict(make().named_buffers())
    model = make().to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.fill_(7.0)
    compute_buffers(model)
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys()
    assert found
    for name, buffer in found.items():
        assert_close(buffer, expected[name], atol=0, rtol=0)


def test_a_buffer_of_the_checkpoint_is_refused():
    model = tiny()
    model.register_buffer("bias", torch.zeros(1))
    with pytest.raises(ValueError, match="keeps bias in its checkpoint"):
        compute_buffers(model)
