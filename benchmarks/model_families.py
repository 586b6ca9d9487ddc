"""Tries small random versions of all causal language models of transformers: which train, generate, and agree.

    python benchmarks/model_families.py                      # a table of all types, about 10 minutes on one thread
    python benchmarks/model_families.py qwen3_next mamba     # some of them

"Equal" compares with the model's own forward of each single sequence: log-probabilities and gradients of a pack of
five, and the log-probabilities that the native engine, with weights from a sync, reports for its samples. For a type
that is refused, the table gives the reason.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import re
import signal
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import set_verbosity_error

from lightrl.engines.base import SamplingParams
from lightrl.engines.native.engine import NativeEngine, empty_copy
from lightrl.models.policy import Policy, response_batch
from lightrl.models.score_check import check_scores

NO_MODEL = "no small model: "
VOCAB = 64
LENGTHS = ((3, 4), (3, 4), (6, 9), (1, 2), (20, 15))  # tokens of prompts and responses; the last passes every window
SAMPLING = SamplingParams(n=2, max_new_tokens=9, seed=1, ignore_eos=True)
SECONDS = 90  # for one type
TOLERANCE = 1e-5  # of log-probabilities in the trainer
GRADIENT_TOLERANCE = 1e-4  # relative to the largest of a tensor
ENGINE_TOLERANCE = 1e-4  # a state that is carried token by token rounds apart from one of a whole sequence

# Sizes of a small model by the names that configs give them. Lists and dictionaries (types of layers, rope) are left to
# the config, which derives them.
SMALL: dict[int, str] = {
    VOCAB: "vocab_size decoder_vocab_size vocab_size_per_layer_input unpadded_vocab_size",
    128: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions model_max_length context_length",
    32: "hidden_size n_embd d_model embedding_size emb_dim embedding_dim attention_hidden_size word_embed_proj_dim "
    "input_embedding_size output_embedding_size lru_width kv_lora_rank q_lora_rank d_inner ple_embed_dim o_lora_rank",
    48: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dff dim_ff feed_forward_size "
    "intermediate_size_mlp dense_intermediate_size",
    16: "index_n_heads "
    "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
    "shared_experts_intermediate_size moe_shared_expert_intermediate_size qk_head_dim router_hidden_size "
    "hidden_size_per_layer_input laurel_rank hc_lowrank gated_norm_rank adapter_rank",
    8: "head_dim d_head dim_head v_head_dim qk_nope_head_dim qk_rope_head_dim kv_channels linear_key_head_dim "
    "linear_value_head_dim linear_head_dim attention_head_size query_pre_attn_scalar index_head_dim swa_head_dim "
    "mamba_n_heads mamba_num_heads mamba_d_head mamba_head_dim state_size ssm_state_size mamba_d_state rotary_dim "
    "index_topk chunk_size mamba_chunk_size block_size "
    "attention_chunk_size sliding_window sliding_window_size attention_window_size window_size local_attention",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers num_decoder_layers num_attention_heads n_head "
    "n_heads num_heads attention_heads decoder_attention_heads num_decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads "
    "swa_num_attention_heads time_step_rank mamba_dt_rank num_blocks d_rel encoder_layers "
    "encoder_attention_heads num_encoder_layers num_encoder_attention_heads rel_extent",
    2: "num_key_value_heads num_kv_heads linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k "
    "swa_num_key_value_heads num_query_groups n_groups o_groups attn_layer_period expert_layer_period zero_expert_num",
    1: "n_group topk_group num_expert_group bos_token_id",
    0: "pad_token_id",
}
SIZES = {name: size for size, names in SMALL.items() for name in names.split()}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
# What types need beyond that.
FIXES: dict[str, dict[str, Any]] = {
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert": {"is_decoder": True},
    "roberta roc_bert roberta-prelayernorm roformer xlm-roberta xlm-roberta-xl": {"is_decoder": True},
    "hunyuan_v1_dense hunyuan_v1_moe ministral": {"head_dim": 8},
    "kimi_linear bailing_hybrid olmo_hybrid minimax granitemoehybrid": LINEAR,
    "lfm2 lfm2_moe lfm3": CONV,
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "jamba": {"attn_layer_offset": 1, "expert_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "moe", "mamba"]},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * 2, "hybrid_layer_ids": [1, 3], "mamba_headdim": 8},
    "zaya": {"num_experts_per_tok": 1},
}
FIXES = {model_type: fix for types, fix in FIXES.items() for model_type in types.split()}


def small_config(model_type: str) -> Any:
    """Returns a config of a small model of a type."""
    return _shrunk(CONFIG_MAPPING[model_type], FIXES.get(model_type, {}))


def _shrunk(kind: Any, fixes: dict[str, Any]) -> Any:
    default = kind()
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {name: value for name, value in default.to_dict().items() if name in fields}
    sizes: dict[str, Any] = {name: SIZES[name] for name in given if name in SIZES and given[name] is not None}
    if "qk_rope_head_dim" in sizes:
        sizes.pop("head_dim", None)  # derived
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)  # latent attention has one for each head
    for name in getattr(kind, "sub_configs", {}):
        if getattr(default, name, None) is not None:
            sizes[name] = _shrunk(type(getattr(default, name)), fixes.get(name, {})).to_dict()
    return kind(**sizes | {"eos_token_id": 2} | fixes)


# ---- One type ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Row:
    """What was seen of one type."""

    model_type: str
    trained: str = ""  # how packs are run; empty: refused
    generated: str = ""
    error: str = ""
    difference: float = 0.0  # of log-probabilities, in the trainer
    gradient_difference: float = 0.0
    engine_difference: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether trainer and engine both ran and agree with the model."""
        return (
            bool(self.trained and self.generated)
            and self.difference <= TOLERANCE
            and self.gradient_difference <= GRADIENT_TOLERANCE
            and self.engine_difference <= ENGINE_TOLERANCE
        )

    def cells(self) -> list[str]:
        """Returns the cells of the table."""
        worst = [f"{self.difference:.0e}", f"{self.gradient_difference:.0e}"] if self.trained else ["", ""]
        trained, generated = self.trained or "refused", self.generated or "refused"
        if not self.trained and not self.generated and self.error.startswith(NO_MODEL):
            trained = generated = "not tried"
        engine = f"{self.engine_difference:.0e}" if self.generated else ""
        equal = "yes" if self.is_equal else "no" if self.trained and self.generated else ""
        return [self.model_type, trained, generated, equal, *worst, engine, self.error.strip().replace("|", "/")]


def random_model(config: Any) -> PreTrainedModel:
    """Returns a model whose weights are large enough that a mistake shows."""
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    return model.eval()


def try_type(model_type: str) -> Row:
    """Trains and generates with a type; never raises."""
    row = Row(model_type)
    stages: list[tuple[str, Callable[[], None]]] = []
    try:
        model = random_model(small_config(model_type))
    except Exception as error:
        row.error = f"{NO_MODEL}{_summary(error)}"
        return row
    reference = copy.deepcopy(model)
    stages = [("trainer", lambda: _train(model, reference, row)), ("engine", lambda: _generate(reference, row))]
    for name, run in stages:
        try:
            run()
        except Exception as error:
            row.error += f"{name}: {_summary(error)} "
    return row


def _train(model: PreTrainedModel, reference: PreTrainedModel, row: Row) -> None:
    pairs = [
        (_tokens(prompt, 2 * seed), _tokens(response, 2 * seed + 1)) for seed, (prompt, response) in enumerate(LENGTHS)
    ]
    expected = torch.cat([own_logprobs(reference, *pair) for pair in pairs])
    weight = torch.linspace(-1, 1, len(expected))
    expected_gradients = _gradients(reference, (expected * weight).sum())
    policy = Policy(model)
    check_scores(policy, torch.device("cpu"))
    logprobs = policy.train()(response_batch(pairs)).logprobs
    gradients = _gradients(model, (logprobs * weight).sum())
    row.difference = (logprobs - expected).abs().max().item()
    largest = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    row.gradient_difference = max(
        (gradients[name] - gradient).abs().max().item() / max(gradient.abs().max().item(), 1e-3 * largest)
        for name, gradient in expected_gradients.items()
    )
    forward = model.get_decoder().__dict__.get("forward")
    row.trained = {None: "packed", "_carry_layout": "recurrent layers apart", "_run_apart": "sequences apart"}[
        getattr(getattr(forward, "__func__", None), "__name__", None)
    ]


def _generate(reference: PreTrainedModel, row: Row) -> None:
    engine = NativeEngine(
        empty_copy(reference, torch.float32, torch.device("cpu")), eos_token_ids=(2,), device=torch.device("cpu")
    )
    engine.load_weights(list(reference.named_parameters()), 1)
    done = engine.generate([_tokens(length, length) for length in (1, 3, 14)], [SAMPLING] * 3)
    row.engine_difference = max(
        (torch.tensor(item.logprobs) - own_logprobs(reference, item.prompt_token_ids, item.output_token_ids))
        .abs()
        .max()
        .item()
        for item in done
    )
    forward: Any = engine._runner._verified
    names = {"FusedForward": "fused", "ModuleForward": "rows", "OwnCacheForward": "own cache"}
    row.generated = "no cache" if getattr(forward, "_recomputes", False) else names[type(forward).__name__]


def own_logprobs(model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """Returns the log-probabilities of a response by the model's own forward of this sequence alone."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float()
    chosen = torch.tensor(response)[:, None]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, chosen)[:, 0]


def _gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return found


def _tokens(count: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, VOCAB, (count,), generator=generator).tolist())


def _summary(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if "differ from its own logits" in text:
        return "changes its logits or mixes tokens in a way that lightrl does not know."
    if "does not reproduce the logits" in text:
        return "its logits depend on later tokens, or fail."
    text = re.sub(r"^Model type '[^']*' cannot be trained: ", "", text)
    return textwrap.shorten(text, 110, placeholder=" ...")


# ---- All types ---------------------------------------------------------------------------------------------------


def main() -> None:
    """Prints a table of the types given, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types of transformers (default: all)")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_long)
    print(f"transformers {transformers_version}\n")
    print("| type | trained | generated | equal | logprob | gradient | engine | reason |")
    print("|---" * 8 + "|")
    counts: Counter[str] = Counter()
    for model_type in chosen.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        signal.alarm(SECONDS)
        row = try_type(model_type)
        signal.alarm(0)
        cells = row.cells()
        print(f"| {' | '.join(cells)} |", flush=True)
        counts.update([f"equal: {cells[3] or 'not both'}", f"trained: {cells[1]}", f"generated: {cells[2]}"])
    print("\n" + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


if __name__ == "__main__":
    main()
