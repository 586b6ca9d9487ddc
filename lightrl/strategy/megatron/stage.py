"""A rank's chunk of a model: layers of a pipeline stage, perhaps with the embedding or the output head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightrl.models.lazy_logits import Logits
from lightrl.records import PackedBatch
from lightrl.strategy.layout.sequence_parallel import SumOverRanks
from lightrl.strategy.megatron import deepseek, modules
from lightrl.strategy.megatron.packing import Pack, lay_out
from lightrl.strategy.megatron.parts import padded_rows
from lightrl.strategy.megatron.ranks import Ranks
from lightrl.strategy.megatron.replay import StageReplay
from lightrl.strategy.megatron.split_logits import logits_of
from lightrl.strategy.megatron.vocabulary import split_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The facts about a model that a stage needs."""

    text: Any  # the language model's config in transformers
    rotary: nn.Module  # transformers' rotary embedding
    has_output: bool
    is_tied: bool
    has_query_norm: bool
    has_bias: bool
    num_experts: int
    replays_routing: bool
    padding_id: int | None  # a token whose embedding gets no gradient from the input, as in transformers

    @property
    def head_size(self) -> int:
        """Size of an attention head."""
        return int(getattr(self.text, "head_dim", None) or self.text.hidden_size // self.text.num_attention_heads)


def core_config(shape: Shape, ranks: Ranks, *, recompute: bool) -> Any:
    """Returns megatron-core's config of the model in this layout."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    text, sizes = shape.text, ranks.sizes
    settings: dict[str, Any] = {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "kv_channels": shape.head_size,
        "layernorm_epsilon": text.rms_norm_eps,
        "qk_layernorm": shape.has_query_norm,
        "add_qkv_bias": shape.has_bias,
        "tensor_model_parallel_size": sizes.tp,
        "pipeline_model_parallel_size": sizes.pp,
        "virtual_pipeline_model_parallel_size": sizes.vpp if sizes.vpp > 1 else None,
        # Otherwise a stage waits until its message is taken by one that waits for a message of this stage: a deadlock.
        "overlap_p2p_comm": sizes.vpp > 1,
        "context_parallel_size": sizes.cp,
        "sequence_parallel": ranks.sequence_parallel,
    }
    if shape.num_experts:
        settings |= {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": text.num_experts_per_tok,
            "moe_ffn_hidden_size": getattr(text, "moe_intermediate_size", None) or text.intermediate_size,
            # transformers divides the chosen weights by their sum: a softmax of the chosen logits.
            "moe_router_pre_softmax": not getattr(text, "norm_topk_prob", True),
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": sizes.ep,
            "expert_tensor_parallel_size": sizes.etp,
        }
    if text.model_type == deepseek.KIND:
        settings |= deepseek.core_settings(text)
    if recompute:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(**_FIXED, **settings)


_FIXED: dict[str, Any] = {
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True,
    "perform_initialization": False,  # the weights come from rank 0
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",  # the only one that takes packs of any length
    "batch_p2p_comm": False,
    "variable_seq_lengths": True,  # every pack has its own length
    "calculate_per_token_loss": True,  # the schedule then does not scale the loss
}


def _layer_spec(shape: Shape, number: int) -> Any:
    """Returns the specification of a layer of megatron-core, by its number in the model, with our leaf modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    num_experts = shape.num_experts if number >= getattr(shape.text, "first_k_dense_replace", 0) else 0
    spec: Any = get_gpt_layer_local_spec(
        num_experts=num_experts or None, qk_layernorm=shape.has_query_norm, normalization="RMSNorm"
    )
    parts = spec.submodules
    attention = parts.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = modules.QueryKeyValue, modules.Rows
    attention.core_attention = modules.PackedAttention
    if shape.has_query_norm:
        attention.q_layernorm = attention.k_layernorm = modules.Norm
    parts.input_layernorm = parts.pre_mlp_layernorm = modules.Norm
    if num_experts:
        parts.mlp.submodules.experts = modules.Experts
    else:
        parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = modules.GateAndUp, modules.Rows
    if shape.text.model_type == deepseek.KIND:
        deepseek.fit_layer(parts, shape.text)
    return spec


class Stage(nn.Module):
    """One chunk of layers. megatron-core's schedule reads config, model_type and vp_stage, and sets the input."""

    def __init__(self, config: Any, shape: Shape, ranks: Ranks, chunk: int, value_head: nn.Linear | None) -> None:
        super().__init__()
        from megatron.core.enums import ModelType
        from megatron.core.tensor_parallel import VocabParallelEmbedding
        from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules

        sizes = ranks.sizes
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.vp_stage = chunk if sizes.vpp > 1 else None
        self.is_first = ranks.is_first_stage and chunk == 0
        self.is_last = ranks.is_last_stage and chunk == sizes.vpp - 1
        self._ranks, self._shape = ranks, shape
        rows, hidden_size = padded_rows(shape.text.vocab_size, sizes.tp), shape.text.hidden_size
        if self.is_first:
            self.embedding = VocabParallelEmbedding(
                rows,
                hidden_size,
                init_method=config.init_method,
                reduce_scatter_embeddings=ranks.sequence_parallel,
                config=config,
                tp_group=ranks.tensors,
            )
        count = config.num_layers // (sizes.pp * sizes.vpp)
        self.first_layer = count * (chunk * sizes.pp + ranks.place.pp)
        specs = [_layer_spec(shape, self.first_layer + index) for index in range(count)]
        layers = TransformerBlockSubmodules(layer_specs=specs, layer_norm=modules.Norm)
        self.decoder = TransformerBlock(
            config, layers, pre_process=self.is_first, post_process=self.is_last, vp_stage=self.vp_stage
        )
        if self.is_last and shape.has_output and not (shape.is_tied and self.is_first):
            self.output_weight = nn.Parameter(torch.empty(rows // sizes.tp, hidden_size))
        self.value_head = value_head if self.is_last else None
        self.rotary = shape.rotary
        self.replay = StageReplay(self.decoder.layers, ranks) if shape.replays_routing else None

    def set_input_tensor(self, tensors: Any) -> None:
        """Takes the states that the previous stage has sent."""
        self.decoder.set_input_tensor(tensors[0] if isinstance(tensors, list) else tensors)

    def pack(self, batch: PackedBatch) -> Pack:
        """Lays a micro-batch out for this rank."""
        ranks = self._ranks
        multiple = ranks.sizes.tp if ranks.sequence_parallel else 1
        pack = lay_out(batch, num_parts=ranks.sizes.cp, part=ranks.place.cp, multiple=multiple)
        positions = torch.cat(pack.own_positions)[None]
        cosines, sines = self.rotary(torch.zeros(1, device=positions.device), positions)
        experts = None if self.replay is None else self.replay.own_experts(batch, pack)
        return replace(pack, angles=(cosines[0, :, None], sines[0, :, None]), experts=experts)

    def forward(self, batch: PackedBatch, pack: Pack) -> Tensor:
        """Returns the states after this chunk's layers, [t, 1, H]."""
        from megatron.core.packed_seq_params import PackedSeqParams

        hidden: Any = None
        if self.is_first:
            input_ids = batch.input_ids[pack.source]
            hidden = self._without_padding_gradient(self.embedding(input_ids[None]), input_ids)
            hidden = hidden if self._ranks.sequence_parallel else hidden.transpose(0, 1).contiguous()
        settings = PackedSeqParams(qkv_format="thd")
        settings.pack = pack
        states: Tensor = self.decoder(hidden, None, packed_seq_params=settings)
        return states

    def _without_padding_gradient(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        """Cuts off the gradient of padding in embeddings, [1, t, H] or, with sequence parallelism, [t / tp, 1, H]."""
        if self._shape.padding_id is None:
            return hidden
        is_padding = input_ids == self._shape.padding_id
        if self._ranks.sequence_parallel:
            is_padding = is_padding.chunk(self._ranks.sizes.tp)[self._ranks.place.tp]
        return torch.where(is_padding.view(*hidden.shape[:2], 1), hidden.detach(), hidden)

    # ---- After the last layer ----------------------------------------------------------------------------------

    def token_scores(
        self, hidden: Tensor, batch: PackedBatch, pack: Pack, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns the log-probabilities and entropies of the response tokens, [N], on every rank."""
        ranks = self._ranks
        hidden = self._before_output(hidden)
        weight = self._output_rows()
        first_row = weight.shape[0] * ranks.place.tp
        weight = weight[: self._shape.text.vocab_size - first_row]  # without the padding

        def score(rows: Tensor, which: Tensor) -> tuple[Tensor, ...]:
            return split_logprobs(
                rows,
                weight,
                batch.targets[which],
                first_row=first_row,
                group=ranks.tensors,
                temperature=batch.temperature,
                with_entropy=with_entropy,
            )

        logprobs, entropy = self._joined(hidden, batch.score_index, pack, score)
        return logprobs, entropy

    def _before_output(self, hidden: Tensor) -> Tensor:
        """Returns the states of all tokens of this part of the sequences; their gradient is summed over the ranks."""
        from megatron.core.tensor_parallel import mappings

        whole: Tensor = (
            mappings.gather_from_sequence_parallel_region(hidden)
            if self._ranks.sequence_parallel
            else mappings.copy_to_tensor_model_parallel_region(hidden)
        )
        return whole

    def _output_rows(self) -> Tensor:
        weight: Tensor = self.output_weight if hasattr(self, "output_weight") else self.embedding.weight
        return weight

    def all_states(self, hidden: Tensor, pack: Pack) -> Tensor:
        """Returns the states of the micro-batch's tokens, [T, H], for a function of logits."""
        if pack.joined is not None:
            raise ValueError(
                f"--megatron.cp_size {self._ranks.sizes.cp} gives each rank some tokens of a sequence, and a function "
                "of logits needs them all. Leave it at 1, or give micro-batches that lightrl.data.packing.pack made."
            )
        return self._before_output(hidden)[pack.where, 0]

    def logits_of(self, states: Tensor) -> Logits:
        """Returns the logits of states, [T, V], which exist for only a few rows at a time."""
        return logits_of(states, self._output_rows(), self._shape.text.vocab_size, self._ranks.sizes.tp)

    def values_at(self, hidden: Tensor, positions: Tensor, pack: Pack) -> Tensor:
        """Returns the numbers of the value head or reward head at positions of the micro-batch, [N]."""
        from megatron.core.tensor_parallel import mappings

        head = self.value_head
        assert head is not None
        if self._ranks.sequence_parallel:  # all ranks compute the same values, so gradients are not summed
            hidden = mappings.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        (values,) = self._joined(hidden, positions, pack, lambda rows, _: (head(rows.float()).reshape(-1),))
        return values

    def _joined(
        self,
        hidden: Tensor,
        positions: Tensor,
        pack: Pack,
        function: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    ) -> list[Tensor]:
        """Applies a function to the states at positions; each rank computes the results for its own tokens."""
        where = pack.where[positions]
        if pack.joined is None:
            return [*function(hidden[where, 0], torch.arange(where.shape[0], device=where.device))]
        (which,) = (where >= 0).nonzero(as_tuple=True)
        results = function(hidden[where[which], 0], which)
        zeros = [part.new_zeros(where.shape[0]) for part in results]
        parts = [zero.index_put((which,), part) for zero, part in zip(zeros, results, strict=True)]
        return [SumOverRanks.apply(part, self._ranks.context) for part in parts]  # type: ignore[no-untyped-call]
