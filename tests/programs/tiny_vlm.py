"""Makes tiny random vision-language models of both families, with processors and a tokenizer of characters."""

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lightrl.models.multimodal import MediaProcessor

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
VISION_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
CHARACTERS = [chr(code) for code in range(32, 127)]
VOCAB = 112
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "in_channels": 3,
}


def tiny_tokenizer(chat_template=None):
    words = ["<pad>", "<eos>", *CHARACTERS]
    raw = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=VISION_TOKENS,
        chat_template=chat_template,
    )


def tiny_config(family):
    tokenizer = tiny_tokenizer()
    start, end, image, video = (tokenizer.convert_tokens_to_ids(token) for token in VISION_TOKENS)
    ids = {
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }
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
        vision_config={
            **_VISION,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        tie_word_embeddings=True,
        **ids,
    )


def tiny_processor(family, chat_template=TEMPLATE):
    """Images of at most 12 tokens; the videos of a few frames likewise."""
    side = 28 if family == "qwen2_5_vl" else 32
    image_size = {"shortest_edge": side**2, "longest_edge": 12 * side**2}
    settings = {"patch_size": side // 2, "temporal_patch_size": 2, "merge_size": 2}
    if family == "qwen3_vl":  # of images as of videos: vLLM has one pair for both
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    image_processor = transformers.Qwen2VLImageProcessor(size=image_size, **settings)
    parts = {"image_processor": image_processor, "tokenizer": tiny_tokenizer(), "chat_template": chat_template}
    if family == "qwen2_5_vl":
        videos = transformers.Qwen2VLVideoProcessor(size=image_size, **settings)
        return transformers.Qwen2_5_VLProcessor(video_processor=videos, **parts)
    video_size = {"shortest_edge": 2 * side**2, "longest_edge": 24 * side**2}
    videos = transformers.Qwen3VLVideoProcessor(size=video_size, **settings)
    return transformers.Qwen3VLProcessor(video_processor=videos, **parts)


def tiny_model(family, seed=0):
    """In float32, with weights wide enough that a wrong image or position shows."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForImageTextToText.from_config(tiny_config(family), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def tiny_media(family, chat_template=TEMPLATE):
    return MediaProcessor(tiny_processor(family, chat_template), tiny_config(family))


def save_tiny_vlm(folder, family):
    """A model folder as --model takes it."""
    tiny_model(family).save_pretrained(folder)
    tiny_processor(family).save_pretrained(folder)


def checkered(width, height, seed=0):
    """An image whose pixels all differ from those of another seed."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def frames(count, width, height, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, height, width, 3), generator=generator, dtype=torch.uint8).numpy()
