"""Makes samples with and without images, and scores them by transformers' own forward, one sequence at a time."""

import torch
from made_samples import made_sample
from tiny_vlm import IMAGE, VIDEO, checkered, frames, tiny_media

from lightrl.models.multimodal import sequence_positions
from lightrl.records import Experience, Prompt

TEMPERATURE = 0.8
TEXTS = {  # prompt, images, videos
    0: (f"ab{IMAGE}c", [(60, 90)], []),
    1: ("no image", [], []),
    2: (f"{IMAGE}x{IMAGE}", [(30, 30), (90, 60)], []),
    3: (f"{VIDEO}{IMAGE}", [(30, 60)], [(3, 40, 40)]),
}
RESPONSES = {(0, 0): "pq", (0, 1): "rst", (1, 0): "uvwx", (2, 0): "y", (3, 0): "z12", (1, 1): "3"}


def shown(index):
    """The images and videos of a text."""
    _, images, videos = TEXTS[index]
    return [checkered(*size, seed=place) for place, size in enumerate(images)], [frames(*size) for size in videos]


class Encoder:
    """Stands for files: what each prompt shows is made on the spot."""

    def __init__(self, family):
        self.media = tiny_media(family)
        self._kept = {}

    def tokenize(self, text):
        return tuple(self.media.processor.tokenizer.encode(text))

    def is_apart(self, sample):
        return False

    def __call__(self, prompt):
        if prompt.index not in self._kept:
            self._kept[prompt.index] = self.media.encode(self.tokenize(TEXTS[prompt.index][0]), *shown(prompt.index))
        return self._kept[prompt.index]


def experiences(encoder, keys=tuple(RESPONSES)):
    """One for each (prompt, sample): the ids as an engine would have seen them."""
    found = []
    for index, sample_index in keys:
        response = encoder.tokenize(RESPONSES[index, sample_index])
        prompt = Prompt(index=index, text="", token_ids=encoder.tokenize(TEXTS[index][0]))
        sample = made_sample(
            prompt=prompt,
            position=index,
            sample_index=sample_index,
            response_ids=response,
            sampler_logprobs=(-4.0,) * len(response),
            prompt_ids=encoder(prompt).token_ids,
        )
        found.append(Experience(sample=sample, reward=0.0, advantage=1.0 - 0.7 * index + sample_index))
    return found


def own_logprobs(model, encoder, experience, temperature=TEMPERATURE):
    """Of the response's tokens, by the whole model of transformers."""
    config, sample = model.config, experience.sample
    encoded = encoder(sample.prompt)
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    inputs = {}
    if encoded.grid_thw is not None:
        is_video = [count > 1 for count in encoded.grid_thw[:, 0].tolist()]
        patches = encoded.pixel_values.split(encoded.grid_thw.prod(-1).tolist())
        for kind, wanted in (("image", False), ("video", True)):
            chosen = [place for place, video in enumerate(is_video) if video is wanted]
            if chosen:
                pixels = "pixel_values" if kind == "image" else "pixel_values_videos"
                inputs[pixels] = torch.cat([patches[place] for place in chosen])
                inputs[f"{kind}_grid_thw"] = encoded.grid_thw[chosen]
        inputs["mm_token_type_ids"] = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
        if "video_grid_thw" in inputs and config.model_type == "qwen2_5_vl":
            # transformers has positions of its own here; ours are proven by numbers in test_multimodal.py
            inputs["position_ids"] = sequence_positions(encoded, ids.shape[1])[:, None]
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0, len(sample.prompt_ids) - 1 : -1]
    scores = (logits.float() / temperature).log_softmax(-1)
    return scores.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]
