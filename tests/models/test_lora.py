"""Adapters in a model: what trains, what is merged, what of peft's files is read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from tiny_hybrids import tiny_model
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, Qwen3Config

from lightrl.config import LoraConfig, OptimConfig
from lightrl.models import lora
from lightrl.models.policy import Policy
from lightrl.models.score_check import check_scores
from lightrl.strategy.optim.parameter_kinds import apply_lr_scales
from lightrl.testing.strategy_contract import single_process
from lightrl.testing.tiny_training import make_batch, samples, tiny_policy

peft = pytest.importorskip("peft")

SHAPE: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "qwen3_tied": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=True),
    "llama": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "phi_biases": transformers.PhiConfig(**{**SHAPE, "num_key_value_heads": 2}),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SHAPE, head_dim=8, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2
    ),
    "gpt2_transposed": transformers.GPT2Config(vocab_size=53, n_embd=16, n_layer=2, n_head=2, n_positions=64),
}
IDS = torch.tensor([[5, 9, 33, 2, 17]])


def made_of(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def disturb(model: nn.Module) -> None:
    """As after some steps: an adapter that was just made adds nothing."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, parameter in lora.trained_parameters(model):
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def test_delta_is_scale_times_up_times_down() -> None:
    down, up = nn.Parameter(torch.tensor([[1.0, 2.0, 3.0]])), nn.Parameter(torch.tensor([[4.0], [5.0]]))
    # 0.5 * [[4, 8, 12], [5, 10, 15]]
    wanted = torch.tensor([[2.0, 4.0, 6.0], [2.5, 5.0, 7.5]])
    assert_close(lora.Adapter(down, up, 0.5, False).delta(down, up), wanted, atol=1e-6, rtol=0)
    assert_close(lora.Adapter(down, up, 0.5, True).delta(down, up), wanted.T, atol=1e-6, rtol=0)


def test_only_adapters_train_and_the_new_model_is_the_old_one() -> None:
    policy, plain = tiny_policy(), tiny_policy()
    lora.add_adapters(policy.hf, LoraConfig(rank=4), seed=0)
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 2  # A and B of seven linear layers in each of two blocks
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert [n for n, _ in lora.plain_parameters(policy.hf)] == [n for n, _ in plain.hf.named_parameters()]
    batch = make_batch(samples(0))
    assert_close(policy(batch).logprobs, plain(batch).logprobs, atol=0, rtol=0)
    check_scores(policy, torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        (LoraConfig(rank=4), 2.0),  # alpha is twice the rank
        (LoraConfig(rank=4, alpha=2.0), 0.5),
        (LoraConfig(rank=4, alpha=2.0, use_rslora=True), 1.0),  # 2 / sqrt(4)
    ],
)
def test_scale(options: LoraConfig, scale: float) -> None:
    model = tiny_policy().hf
    lora.add_adapters(model, options, seed=0)
    assert {adapter.scale for adapter in lora.adapters_of(model).values()} == {scale}


def test_target_modules_choose_the_layers() -> None:
    model = tiny_policy().hf
    lora.add_adapters(model, LoraConfig(rank=2, target_modules=("q_proj", "v_proj")), seed=0)
    names = [f"model.layers.{layer}.self_attn.{kind}_proj.weight" for layer in (0, 1) for kind in "qv"]
    assert sorted(lora.adapters_of(model)) == names


def test_adapters_hang_on_the_seed_alone() -> None:
    drawn = []
    for seed, noise in ((1, 0), (1, 99), (2, 0)):
        model = tiny_policy().hf
        torch.manual_seed(noise)
        lora.add_adapters(model, LoraConfig(rank=2), seed=seed)
        drawn.append(torch.cat([item.flatten() for _, item in lora.trained_parameters(model)]))
        after = torch.rand(1)
        torch.manual_seed(noise)
        assert torch.equal(after, torch.rand(1))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_model_on_the_meta_device_gets_the_same_names() -> None:
    real, meta = tiny_policy().hf, tiny_policy(device="meta").hf
    for model in (real, meta):
        lora.add_adapters(model, LoraConfig(rank=2), seed=0)
    assert all(parameter.is_meta for parameter in meta.parameters())
    shapes = [[(name, item.shape, item.requires_grad) for name, item in m.named_parameters()] for m in (real, meta)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_weights_give_the_same_logits(name: str) -> None:
    model, plain = made_of(CONFIGS[name]), made_of(CONFIGS[name])
    lora.add_adapters(model, LoraConfig(rank=4), seed=0)
    before = logits(model)
    assert_close(before, logits(plain), atol=0, rtol=0)
    disturb(model)
    assert (logits(model) - before).abs().max() > 0.01
    merged = dict(single_process().full_parameters(model))
    assert sorted(merged) == sorted(name for name, _ in plain.named_parameters())
    plain.load_state_dict(merged, strict=False)  # a tied head is under one of its names
    assert_close(logits(plain), logits(model), atol=1e-5, rtol=0)


# Families with layers that cannot have an adapter: kernels of Mamba read their weights, peft takes dense layers for
# experts, or a router is a linear layer that returns more than a product.
PARTLY = {
    "bamba": {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "falcon_h1": {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    "mamba": {"in_proj"},
    "qwen3_next": {"in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj"}
    | {"shared_expert_gate"},
    "llama4_text": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}


@pytest.mark.parametrize("family", [*PARTLY, "jamba", "nemotron_h", "zamba2"])
def test_every_adapter_of_the_default_layers_learns_and_is_read_by_peft(family: str, tmp_path: Path) -> None:
    model, plain = tiny_model(family), tiny_model(family)
    lora.add_adapters(model, LoraConfig(rank=2), seed=0)
    disturb(model)
    layers = {name.rpartition(".")[2] for name, _ in lora.lora_layers(model)}
    assert layers == PARTLY.get(family, layers)
    model(input_ids=IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert [name for name, item in lora.trained_parameters(model) if not item.grad.any()] == []  # type: ignore[union-attr]
    lora.save_adapter(model, dict(lora.trained_parameters(model)), tmp_path)
    theirs = peft.PeftModel.from_pretrained(tiny_model(family), str(tmp_path))
    assert_close(logits(theirs), logits(model), atol=1e-5, rtol=0)
    plain.load_state_dict(dict(single_process().full_parameters(model)), strict=False)
    assert_close(logits(plain), logits(model), atol=1e-4, rtol=0)


def test_without_adapters_is_the_model_before() -> None:
    policy, frozen = tiny_policy(), tiny_policy()
    lora.add_adapters(policy.hf, LoraConfig(rank=4), seed=0)
    disturb(policy.hf)
    batch = make_batch(samples(0))
    trained = policy(batch).logprobs
    flags = [parameter.requires_grad for parameter in policy.parameters()]

    def compare_and_fail() -> None:
        with lora.without_adapters(policy):
            assert_close(policy(batch).logprobs, frozen(batch).logprobs, atol=0, rtol=0)
            assert flags == [parameter.requires_grad for parameter in policy.parameters()]
            raise KeyError

    with pytest.raises(KeyError):
        compare_and_fail()
    assert_close(policy(batch).logprobs, trained, atol=0, rtol=0)
    with lora.without_adapters(frozen):
        assert_close(frozen(batch).logprobs, tiny_policy()(batch).logprobs, atol=0, rtol=0)


# ---- Files -------------------------------------------------------------------------------------------------------


def saved_by_peft(folder: Path, **settings: Any) -> Any:
    model = made_of(CONFIGS["qwen3_tied"])
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "up_proj"], **settings})
    wrapped = peft.get_peft_model(model, config)
    disturb(wrapped)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def test_an_adapter_that_peft_saved_is_read(tmp_path: Path) -> None:
    theirs = saved_by_peft(tmp_path, rank_pattern={"up_proj": 2}, lora_dropout=0.5)
    ours = made_of(CONFIGS["qwen3_tied"])
    lora.add_adapters(ours, LoraConfig(path=str(tmp_path)), seed=0)
    assert_close(logits(ours), logits(theirs), atol=1e-6, rtol=0)
    assert_close(logits(ours.train()), logits(theirs), atol=1e-6, rtol=0)  # its dropout is off
    assert all(".lora_" in name for name, _ in lora.trained_parameters(ours))


@pytest.mark.parametrize("left_out", [["q_proj"], r".*layers\.0.*"])
def test_an_adapter_that_leaves_layers_out_is_read_and_saved(left_out: list[str] | str, tmp_path: Path) -> None:
    theirs = saved_by_peft(tmp_path, target_modules="all-linear", exclude_modules=left_out)
    ours = made_of(CONFIGS["qwen3_tied"])
    lora.add_adapters(ours, LoraConfig(path=str(tmp_path)), seed=0)
    assert_close(logits(ours), logits(theirs), atol=1e-6, rtol=0)
    lora.save_adapter(ours, dict(lora.trained_parameters(ours)), tmp_path / "again")
    again = peft.PeftModel.from_pretrained(made_of(CONFIGS["qwen3_tied"]), str(tmp_path / "again"))
    assert_close(logits(again), logits(theirs), atol=1e-6, rtol=0)


@pytest.mark.parametrize("left_out", [["q_proj"], r".*q_proj"])
def test_an_adapter_leaves_out_its_layers_and_those_that_train_whole(left_out: list[str] | str, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj", "score"], exclude_modules=left_out, modules_to_save=["score"]
    )
    saved = classifier()
    lora.add_adapters(saved, LoraConfig(rank=2, target_modules=("v_proj",)), seed=0, trained=("score",))
    lora.save_adapter(saved, dict(lora.trained_parameters(saved)), tmp_path)
    config.save_pretrained(tmp_path)
    again = classifier()
    lora.add_adapters(again, LoraConfig(path=str(tmp_path)), seed=0, trained=("score",))
    assert {name.rpartition(".")[2] for name, _ in lora.lora_layers(again)} == {"v_proj"}


def test_a_saved_adapter_is_read_by_peft(tmp_path: Path) -> None:
    ours = made_of(CONFIGS["llama"])
    lora.add_adapters(ours, LoraConfig(rank=4), seed=0)
    disturb(ours)
    lora.save_adapter(ours, dict(lora.trained_parameters(ours)), tmp_path)
    theirs = peft.PeftModel.from_pretrained(made_of(CONFIGS["llama"]), str(tmp_path))
    assert_close(logits(theirs), logits(ours), atol=1e-6, rtol=0)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4


def test_a_part_of_an_adapter_that_is_frozen_is_saved_too(tmp_path: Path) -> None:
    ours = made_of(CONFIGS["llama"])
    lora.add_adapters(ours, LoraConfig(rank=4), seed=0)
    disturb(ours)
    apply_lr_scales([ours], OptimConfig(lr_scales=("lora_A=0",)), must_match=True)
    lora.save_adapter(ours, dict(lora.trained_parameters(ours)), tmp_path)
    theirs = peft.PeftModel.from_pretrained(made_of(CONFIGS["llama"]), str(tmp_path))
    assert_close(logits(theirs), logits(ours), atol=1e-6, rtol=0)


def classifier() -> Any:
    torch.manual_seed(1)
    config = Qwen3Config(**SHAPE, head_dim=8, num_labels=1)
    return AutoModelForTokenClassification.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_head_trains_whole_and_goes_with_the_adapter(is_frozen: bool, tmp_path: Path) -> None:
    ours = classifier()
    lora.add_adapters(ours, LoraConfig(rank=2), seed=0, trained=("score",))
    assert isinstance(ours.score, nn.Linear)
    assert ours.score.weight.requires_grad
    if is_frozen:
        apply_lr_scales([ours], OptimConfig(lr_scales=("score=0",)), must_match=True)
    disturb(ours)
    lora.save_adapter(ours, dict(lora.trained_parameters(ours)), tmp_path)
    theirs = peft.PeftModel.from_pretrained(classifier(), str(tmp_path))
    assert_close(logits(theirs), logits(ours), atol=1e-6, rtol=0)
    again = classifier()
    lora.add_adapters(again, LoraConfig(path=str(tmp_path)), seed=0, trained=("score",))
    assert_close(logits(again), logits(ours), atol=1e-6, rtol=0)


# ---- Refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (("lm_head",), "names lm_head"),
        (("embed_tokens",), "names model.embed_tokens"),
        (("q_prj",), "for example, down_proj, gate_proj, k_proj"),
    ],
)
def test_layers_that_can_have_no_adapter_are_refused(targets: tuple[str, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lora.add_adapters(tiny_policy().hf, LoraConfig(rank=2, target_modules=targets), seed=0)


@pytest.mark.parametrize(
    ("family", "layer", "text"),
    [("jamba", "dt_proj", "an adapter of it would do nothing"), ("llama4_text", "router", "only linear layers inside")],
)
def test_layers_that_would_not_apply_an_adapter_are_refused(family: str, layer: str, text: str) -> None:
    with pytest.raises(ValueError, match=rf"--lora.target_modules names model\.layers\.\d\.\w+\.{layer}, and {text}"):
        lora.add_adapters(tiny_model(family), LoraConfig(rank=2, target_modules=(layer,)), seed=0)


class Reshaping(nn.Linear):
    """Draws random numbers, and takes only batches of sequences."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(self.in_features)
        rows, length, _ = batch.shape
        return super().forward(noise * batch).view(rows, length, -1)


def test_layers_of_other_classes_are_tried() -> None:
    """Trying a layer changes no random draw, and a class made from a block of Mamba is one."""
    model = tiny_model("mamba2")
    mixer = model.backbone.layers[0].mixer
    mixer.__class__ = type("OwnMixer", (type(mixer),), {})
    model.backbone.extra = Reshaping(4, 4)
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    lora.add_adapters(model, LoraConfig(rank=2), seed=0)
    assert torch.rand(1) == expected
    layers = {name.rpartition(".")[2] for name, _ in lora.lora_layers(model)}
    assert layers == {"in_proj"}


def test_layers_that_share_a_weight_have_no_adapter() -> None:
    """A weight that holds an adapter merged is that of the other layer too."""

    def model() -> Any:
        shared = made_of(CONFIGS["llama"])
        first, second = (layer.mlp.up_proj for layer in shared.model.layers)
        second.weight = first.weight
        return shared

    ours = model()
    lora.add_adapters(ours, LoraConfig(rank=2), seed=0)
    layers = {name.rpartition(".")[2] for name, _ in lora.lora_layers(ours)}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"}
    with pytest.raises(ValueError, match=r"names model\.layers\.0\.mlp\.up_proj, whose weight belongs"):
        lora.add_adapters(model(), LoraConfig(rank=2, target_modules=("up_proj",)), seed=0)


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    saved_by_peft(tmp_path / "dora", use_dora=True)
    with pytest.raises(ValueError, match="DoRA"):
        lora.add_adapters(made_of(CONFIGS["qwen3_tied"]), LoraConfig(path=str(tmp_path / "dora")), seed=0)
    saved_by_peft(tmp_path / "alora", alora_invocation_tokens=[3])  # it acts behind these tokens only
    with pytest.raises(
        ValueError, match=r"alora asks for alora_invocation_tokens, which is not applied here\. Save it"
    ):
        lora.add_adapters(made_of(CONFIGS["qwen3_tied"]), LoraConfig(path=str(tmp_path / "alora")), seed=0)
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json\.$"):
        lora.add_adapters(made_of(CONFIGS["qwen3_tied"]), LoraConfig(path=str(tmp_path)), seed=0)
    saved_by_peft(tmp_path / "adapter")  # as in final/ of a run
    with pytest.raises(
        FileNotFoundError, match=rf"no adapter_config\.json\. Its folder adapter/ is one: {tmp_path}/adapter"
    ):
        lora.add_adapters(made_of(CONFIGS["qwen3_tied"]), LoraConfig(path=str(tmp_path)), seed=0)


def test_an_adapter_that_changed_the_weights_beside_it_is_refused(tmp_path: Path) -> None:
    """Without it, such a model is what the initialization left of its weights, which is no reference."""
    for drawn in ("pissa", "olora"):
        saved_by_peft(tmp_path / drawn, init_lora_weights=drawn)
        with pytest.raises(ValueError, match=f"began with init_lora_weights {drawn}"):
            lora.add_adapters(made_of(CONFIGS["qwen3_tied"]), LoraConfig(path=str(tmp_path / drawn)), seed=0)


def test_an_adapter_of_pissa_that_peft_converted_is_one_of_the_plain_weights(tmp_path: Path) -> None:
    model = made_of(CONFIGS["llama"])
    plain = logits(model)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    theirs = peft.get_peft_model(model, config)
    theirs.save_pretrained(tmp_path / "start")
    disturb(theirs)
    theirs.save_pretrained(tmp_path / "end", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    ours = made_of(CONFIGS["llama"])
    lora.add_adapters(ours, LoraConfig(path=str(tmp_path / "end")), seed=0)
    assert_close(logits(ours), logits(theirs), atol=1e-5, rtol=0)
    with lora.without_adapters(ours):
        assert_close(logits(ours), plain, atol=0, rtol=0)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    saved_by_peft(tmp_path)
    begin = rf"--lora\.path {tmp_path} does not fit the model: "
    wider = Qwen3Config(**{**SHAPE, "hidden_size": 24}, head_dim=8)
    for config, text in ((wider, r"misshapen .* instead of \("), (CONFIGS["gpt2_transposed"], "Target modules")):
        with pytest.raises(ValueError, match=begin + text):
            lora.add_adapters(made_of(config), LoraConfig(path=str(tmp_path)), seed=0)
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=begin + r".*unknown base_model\.model\.x\.lora_A\.weight\."):
        lora.add_adapters(made_of(CONFIGS["qwen3_tied"]), LoraConfig(path=str(tmp_path)), seed=0)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_damaged_adapter_is_named(tmp_path: Path, name: str) -> None:
    saved_by_peft(tmp_path)
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(ValueError, match=rf"--lora\.path {tmp_path}: its {name} cannot be read: "):
        lora.add_adapters(made_of(CONFIGS["qwen3_tied"]), LoraConfig(path=str(tmp_path)), seed=0)


def test_without_peft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "lightrl\[lora\]"'):
        lora.add_adapters(tiny_policy().hf, LoraConfig(rank=2), seed=0)


def test_a_policy_of_a_peft_model_is_seen_as_the_plain_one() -> None:
    """For callers who bring their own: the strategy reads its merged weights under the plain names."""
    wrapped = peft.get_peft_model(made_of(CONFIGS["llama"]), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    disturb(wrapped)
    merged = dict(single_process().full_parameters(wrapped))
    plain = made_of(CONFIGS["llama"])
    plain.load_state_dict(merged)
    assert_close(logits(plain), logits(wrapped), atol=1e-5, rtol=0)
    assert isinstance(Policy(wrapped.get_base_model()), Policy)
