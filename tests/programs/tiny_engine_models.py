"""Saves tiny random models of text, experts and vision, of sizes that vLLM's CPU attention takes (heads of 32)."""

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 98  # vLLM pads it to 128
EOS = 1
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
}
_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
VISION_FAMILIES = ("qwen2_5_vl", "qwen3_vl")


def _experts():
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return transformers.Qwen3MoeConfig(**_TEXT, head_dim=32, **sizes)


TEXT_FAMILIES = {
    "tied": lambda: transformers.Qwen3Config(**_TEXT, head_dim=32, tie_word_embeddings=True),
    "untied": lambda: transformers.Qwen2Config(**_TEXT, tie_word_embeddings=False),
    "experts": _experts,
}


def tiny_tokenizer():
    words = ["<pad>", "<eos>", *map(chr, range(33, 123))]
    raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(_VISION_TOKENS)
    )


def _vision_config(family):
    start, end, image, video = tiny_tokenizer().convert_tokens_to_ids(list(_VISION_TOKENS))
    ids = {"vision_start_token_id": start, "vision_end_token_id": end, "image_token_id": image, "video_token_id": video}
    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    if family == "qwen2_5_vl":
        return transformers.Qwen2_5_VLConfig(
            text_config={**_TEXT, "rope_parameters": rope, "tie_word_embeddings": False},
            vision_config={**_VISION, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
            tie_word_embeddings=False,
            **ids,
        )
    return transformers.Qwen3VLConfig(
        text_config={
            **_TEXT,
            "head_dim": 32,
            "rope_parameters": {**rope, "mrope_interleaved": True},
            "tie_word_embeddings": True,
        },
        vision_config={**_VISION, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=True,
        **ids,
    )


def _save_processor(family, folder):
    side = 28 if family == "qwen2_5_vl" else 32
    size = {"shortest_edge": side**2, "longest_edge": 12 * side**2}
    settings = {"patch_size": side // 2, "temporal_patch_size": 2, "merge_size": 2, "size": size}
    tokenizer = tiny_tokenizer()
    if (
        family == "qwen3_vl"
    ):  # vLLM normalises videos by the values for images; in the family's models they are the same
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = transformers.Qwen2VLImageProcessor(**settings)
    if family == "qwen2_5_vl":
        videos = transformers.Qwen2VLVideoProcessor(**settings)
        processor = transformers.Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template="")
    else:
        videos = transformers.Qwen3VLVideoProcessor(**settings)
        processor = transformers.Qwen3VLProcessor(images, tokenizer, videos, chat_template="")
    processor.save_pretrained(folder)


def save_tiny_model(family, folder, seed=0):
    """A model folder as --model takes it; weights wide enough that a mistake shows in the logprobs."""
    is_vision = family in VISION_FAMILIES
    torch.manual_seed(seed)
    kind = transformers.AutoModelForImageTextToText if is_vision else transformers.AutoModelForCausalLM
    model = kind.from_config(_vision_config(family) if is_vision else TEXT_FAMILIES[family](), dtype=torch.float32)
    shake(model, 0.08)
    model.save_pretrained(folder)
    if is_vision:
        _save_processor(family, folder)
    else:
        tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def load_tiny_model(family, folder):
    kind = transformers.AutoModelForImageTextToText if family in VISION_FAMILIES else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def shake(model, scale=0.03, seed=1):
    """As if it had been trained for a while."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
