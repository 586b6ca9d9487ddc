"""A critic of prompts with images sees what the policy sees."""

from pathlib import Path

import pytest
import torch
from tiny_vlm import FAMILIES, save_tiny_vlm, tiny_model
from tiny_vlm_training import Encoder, experiences
from torch.testing import assert_close

from lightrl.data.packing import dummy_batch, pack
from lightrl.models.critic import ActorCritic, load_critic


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_a_mixed_pack(family: str, tmp_path: Path) -> None:
    save_tiny_vlm(tmp_path, family)
    encoder = Encoder(family)
    batch = pack(experiences(encoder), temperature=1.0, old_logprobs=None, ref_logprobs=None, encode=encoder)
    critic = load_critic(str(tmp_path), materialize=True, init_std=0.5, seed=0)
    both = ActorCritic(tiny_model(family), critic.value_head)
    both.hf.load_state_dict({f"model.{name}": value for name, value in critic.body.state_dict().items()}, strict=False)
    with torch.no_grad():
        found, wanted = critic(batch), both(batch)
    assert_close(found.values, wanted.values, atol=1e-5, rtol=1e-5)
    assert len(set(found.values.tolist())) > len(batch.keys)
    critic(dummy_batch(temperature=1.0)).values.sum().backward()  # the vision tower takes part on every rank
    assert [name for name, parameter in critic.named_parameters() if parameter.grad is None] == []
