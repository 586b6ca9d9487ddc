"""Images and videos of vision-language models: turns the placeholder of each into token ids, patches and positions.

Only this module knows how a model family lays out an image. Trainers, the native engine and the check of a data set use
it.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoProcessor

from lightrl.models.hub import file_of
from lightrl.models.token_split import Tokens
from lightrl.records import EncodedPrompt, VisionInputs

logger = logging.getLogger(__name__)

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
VIDEO_FPS = 2.0  # all frames of a video are used and assumed to be half a second apart

ImageSize = tuple[int, int]  # height, width
VideoSize = tuple[int, int, int]  # frames, height, width


@dataclass(frozen=True, slots=True)
class _Extent:
    """The tokens that an image or video becomes."""

    num_features: int  # vision features, one token each
    num_frames: int = 1  # of the video before processing


class MediaProcessor:
    """A model's own preprocessing in two steps, so that tokens can be counted before any pixels are read."""

    def __init__(self, processor: Any, config: Any) -> None:
        """Takes the transformers processor of the model, and the model's config."""
        self.processor = processor
        self.config = config
        self.image_token_id = int(config.image_token_id)
        self.video_token_id = int(config.video_token_id)
        self._per_feature = int(config.vision_config.spatial_merge_size) ** 2  # patches that become one token

    @classmethod
    def load(cls, path: str, *, trust_remote_code: bool = False) -> MediaProcessor | None:
        """Loads the processor of a folder or Hugging Face name; returns None for a model that takes no images."""
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if config.model_type not in FAMILIES:
            return None
        try:
            processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        except ImportError as error:
            raise ImportError(
                f'Images need Pillow and torchvision: pip install "lightrl[vision]". ({error})'
            ) from error
        except (OSError, ValueError) as error:  # the folder has none; AutoProcessor may fall back on the tokenizer
            processor, reason = None, f" ({error})"
        else:
            reason = ""
        if getattr(processor, "image_processor", None) is None:
            raise ValueError(
                f"{path} has no processor for images: save it there with processor.save_pretrained().{reason}"
            )
        processor.chat_template = processor.chat_template or processor.tokenizer.chat_template
        return cls(processor, config)

    def expanded(
        self, token_ids: Sequence[int], images: Sequence[ImageSize], videos: Sequence[VideoSize]
    ) -> tuple[int, ...]:
        """Expands ids with one placeholder per file to the ids that the model sees; needs sizes only, not pixels."""
        image_processor, video_processor = self.processor.image_processor, self.processor.video_processor
        image_extents = [
            _Extent(image_processor.get_number_of_image_patches(*size, {}) // self._per_feature) for size in images
        ]
        video_extents = [
            _Extent(video_processor.get_num_of_video_patches(*size, {}) // self._per_feature, size[0])
            for size in videos
        ]
        return self._expand(token_ids, image_extents, video_extents)

    def encode(self, token_ids: Sequence[int], images: Sequence[Any], videos: Sequence[Any]) -> EncodedPrompt:
        """Encodes ids with one placeholder per file, PIL images, and video arrays [frames, height, width, 3]."""
        image_patches = [self._image_patches(image) for image in images]
        video_patches = [self._video_patches(video) for video in videos]
        ids = self._expand(
            token_ids,
            [_Extent(self._num_features(grid)) for _, grid in image_patches],
            [
                _Extent(self._num_features(grid), len(item))
                for item, (_, grid) in zip(videos, video_patches, strict=True)
            ],
        )
        patches = {self.image_token_id: iter(image_patches), self.video_token_id: iter(video_patches)}
        return self._assembled(ids, [next(patches[token]) for token in token_ids if token in patches])

    def encode_expanded(
        self, token_ids: Sequence[int], images: Sequence[Any], before: EncodedPrompt | None = None
    ) -> EncodedPrompt:
        """Encodes the ids of a whole episode, which an engine has expanded already, and the images in it.

        Args:
            before: the encoded prompt that the ids begin with, whose images are not among the given ones. It is left
                out if the given ones have all the places.
        """
        parts = (
            [] if before is None or self.are_all_shown(token_ids, images) else [(before.pixel_values, before.grid_thw)]
        )
        shown = [(pixels, grids) for pixels, grids in parts if pixels is not None and grids is not None]
        encoded = self._assembled(tuple(token_ids), shown + [self._image_patches(image) for image in images])
        num_features = 0 if encoded.grid_thw is None else int(encoded.grid_thw.prod(1).sum()) // self._per_feature
        if len(encoded.feature_positions) != num_features:
            raise ValueError(
                f"the images have {num_features} tokens in the trainer and {len(encoded.feature_positions)} in the "
                "engine. Give both the same processor settings"
            )
        return encoded

    def are_all_shown(self, token_ids: Sequence[int], images: Sequence[Any]) -> bool:
        """Returns whether these PIL images have as many tokens as the expanded ids have for images and videos."""
        sizes = [(image.height, image.width) for image in images]
        num_features = len(self.expanded([self.image_token_id] * len(images), sizes, ()))
        return num_features == sum(token in (self.image_token_id, self.video_token_id) for token in token_ids)

    def _assembled(self, ids: tuple[int, ...], in_order: Sequence[tuple[Tensor, Tensor]]) -> EncodedPrompt:
        """Returns expanded ids with the patches and the grids, [3] or [M, 3], of what they show, in token order."""
        special = (self.image_token_id, self.video_token_id)
        grid_thw = torch.cat([grid.view(-1, 3) for _, grid in in_order]) if in_order else None
        positions, rope_delta = rope_positions(self.config, ids, grid_thw)
        return EncodedPrompt(
            token_ids=ids,
            positions=positions,
            rope_delta=rope_delta,
            feature_positions=torch.tensor([i for i, token in enumerate(ids) if token in special], dtype=torch.int64),
            pixel_values=torch.cat([part for part, _ in in_order]) if in_order else None,
            grid_thw=grid_thw,
        )

    def _image_patches(self, image: Any) -> tuple[Tensor, Tensor]:
        """Returns the patches, [patches, patch_dim], and the grid, [3], of one image, independent of its neighbours."""
        output = self.processor.image_processor([image], return_tensors="pt")
        return output["pixel_values"].float(), output["image_grid_thw"][0]

    def _video_patches(self, video: Any) -> tuple[Tensor, Tensor]:
        output = self.processor.video_processor([video], do_sample_frames=False, return_tensors="pt")
        return output["pixel_values_videos"].float(), output["video_grid_thw"][0]

    def _num_features(self, grid: Tensor) -> int:
        return int(grid.prod()) // self._per_feature

    def _expand(self, token_ids: Sequence[int], images: list[_Extent], videos: list[_Extent]) -> tuple[int, ...]:
        self._check_counts(token_ids, len(images), len(videos))
        next_image, next_video = iter(images), iter(videos)
        names_frames = self.config.model_type == "qwen3_vl"
        ids: list[int] = []
        index = 0
        while index < len(token_ids):
            token = token_ids[index]
            if token == self.image_token_id:
                ids += [token] * next(next_image).num_features
            elif token == self.video_token_id and names_frames:
                ids += self._timed_frames(next(next_video))
            elif token == self.video_token_id:
                ids += [token] * next(next_video).num_features
            else:
                ids.append(token)
            index += 1
        return tuple(ids)

    def _check_counts(self, token_ids: Sequence[int], num_images: int, num_videos: int) -> None:
        for kind, token_id, given in (
            ("image", self.image_token_id, num_images),
            ("video", self.video_token_id, num_videos),
        ):
            count = sum(token == token_id for token in token_ids)
            if count != given:
                placeholder = self.processor.tokenizer.convert_ids_to_tokens(token_id)
                raise ValueError(
                    f"the prompt has {count} {kind} placeholder(s) {placeholder} and {given} {kind}(s): it must have "
                    f"one for each. In a text that a chat template renders, <{kind}> is one."
                )

    def _timed_frames(self, video: _Extent) -> Iterator[int]:
        """Yields the tokens of a Qwen3-VL video: for each merged frame its mean time as text, then its features."""
        merged, last = self.processor.video_processor.temporal_patch_size, video.num_frames - 1
        firsts = range(0, video.num_frames, merged)
        for first in firsts:
            seconds = (first + min(first + merged - 1, last)) / 2 / VIDEO_FPS  # the last frame stands for missing ones
            yield from self.processor.tokenizer.encode(f"<{seconds:.1f} seconds>", add_special_tokens=False)
            yield self.config.vision_start_token_id
            yield from [self.video_token_id] * (video.num_features // len(firsts))
            yield self.config.vision_end_token_id


def copy_processor(source: str, folder: Path) -> None:
    """Copies the files that say how images are processed from a model's folder or hub name, unless they are there.

    A model that takes images in a way that lightrl does not know is trained on text, and needs them afterwards.
    """
    for name in _PROCESSOR_FILES if source else ():
        try:
            file = file_of(source, name)
        except OSError as error:  # the folder may be gone by the end of the run
            logger.warning("%s lacks the files of its image processor: %s", folder, error)
            return
        if file and not (folder / name).exists():
            shutil.copyfile(file, folder / name)  # without its mode: that of a shared model may be read-only


def rope_positions(config: Any, token_ids: Sequence[int], grid_thw: Tensor | None) -> tuple[Tensor, int]:
    """Returns the positions of expanded ids, [3, L], and the offset from the index of a later token to its position.

    The rule is that of the models' authors and of the engines: a feature has its frame, row and column, counted from
    the beginning of its image, and the next token follows the largest of these. get_rope_index() of transformers 5
    gives other positions for videos of Qwen2.5-VL, which differ between its versions. This function can go when
    they agree: https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/models/qwen2_5_vl/modeling_qwen2_5_vl.py

    Args:
        grid_thw: [M, 3] patches of each image and video, in token order.
    """
    vision = config.vision_config
    special = (config.image_token_id, config.video_token_id)
    grids = iter([] if grid_thw is None else _position_grids(config, grid_thw))
    time_step = getattr(vision, "tokens_per_second", 0) * vision.temporal_patch_size / VIDEO_FPS
    parts: list[Tensor] = []
    index = begin = 0
    while index < len(token_ids):
        if token_ids[index] in special:
            frames, rows, columns = next(grids)
            part = torch.cartesian_prod(torch.arange(frames), torch.arange(rows), torch.arange(columns)).T
            part = torch.stack(((part[0] * time_step).long(), part[1], part[2]))
        else:
            end = next((i for i in range(index, len(token_ids)) if token_ids[i] in special), len(token_ids))
            part = torch.arange(end - index).expand(3, -1)
        parts.append(part + begin)
        index += part.shape[1]
        begin += int(part.max()) + 1
    return torch.cat(parts, dim=1), begin - len(token_ids)


def _position_grids(config: Any, grid_thw: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yields frames, rows and columns of features; each frame of a Qwen3-VL video is an image that follows its time."""
    merged = int(config.vision_config.spatial_merge_size)
    for frames, height, width in grid_thw.tolist():
        rows, columns = height // merged, width // merged
        if config.model_type == "qwen3_vl":
            yield from [(1, rows, columns)] * frames
        else:
            yield frames, rows, columns


def sequence_positions(prompt: EncodedPrompt, num_tokens: int) -> Tensor:
    """Returns the positions of the prompt and of the text that follows it, [3, num_tokens]."""
    behind = torch.arange(len(prompt.token_ids), num_tokens) + prompt.rope_delta
    return torch.cat((prompt.positions, behind.expand(3, -1)), dim=1)


def pack_positions(lengths: Sequence[int], prompts: Sequence[EncodedPrompt]) -> Tensor:
    """Returns the positions of sequences laid end to end that begin with these prompts, [3, T]."""
    return torch.cat([sequence_positions(*pair) for pair in zip(prompts, lengths, strict=True)], dim=1)


def join_vision(prompts: Sequence[EncodedPrompt], starts: Sequence[int]) -> VisionInputs | None:
    """Joins the images and videos of the prompts in a pack; None if there are none.

    The prompts begin at ascending positions. A prompt that several samples share goes through the vision tower once.
    """
    pixel_values: list[Tensor] = []
    grids: list[Tensor] = []
    positions: list[Tensor] = []
    indices: list[Tensor] = []
    first_feature: dict[int, int] = {}
    num_features = 0
    for prompt, start in zip(prompts, starts, strict=True):
        if prompt.pixel_values is None or prompt.grid_thw is None:
            continue
        if id(prompt) not in first_feature:
            first_feature[id(prompt)] = num_features
            num_features += len(prompt.feature_positions)
            pixel_values.append(prompt.pixel_values)
            grids.append(prompt.grid_thw)
        positions.append(prompt.feature_positions + start)
        indices.append(torch.arange(len(prompt.feature_positions)) + first_feature[id(prompt)])
    if not positions:
        return None
    return VisionInputs(
        pixel_values=torch.cat(pixel_values),
        grid_thw=torch.cat(grids),
        feature_positions=torch.cat(positions),
        feature_index=torch.cat(indices),
    )


def patch_dim(config: Any) -> int:
    """Returns the number of values in a patch of pixels."""
    vision = config.vision_config
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def blank_vision(config: Any, device: torch.device) -> VisionInputs:
    """Returns a smallest image that no token stands for: the vision tower then runs, with a zero gradient."""
    side = int(config.vision_config.spatial_merge_size)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return VisionInputs(
        pixel_values=torch.zeros(side * side, patch_dim(config), device=device),
        grid_thw=torch.tensor([[1, side, side]], device=device),
        feature_positions=nothing,
        feature_index=nothing,
    )


def embedded(model: Any, tokens: Tokens) -> dict[str, Any]:
    """Returns the text decoder's inputs for a rank's tokens, with the features of images in place of ids.

    Every rank runs the vision tower, with or without an image: if the tower is sharded, a rank that skipped it would
    leave the others waiting.
    """
    config, vision = model.config, tokens.vision
    shown = None if vision is None else _shown(vision, int(config.vision_config.spatial_merge_size) ** 2)
    return decoder_inputs(model, tokens.input_ids[None], shown or blank_vision(config, tokens.input_ids.device))


def _shown(vision: VisionInputs, per_feature: int) -> VisionInputs | None:
    """Returns the images that have tokens in this rank's part of a pack, which may be only some; None if none has."""
    counts = vision.grid_thw.prod(1)
    ends = (counts // per_feature).cumsum(0)
    image_of = torch.bucketize(vision.feature_index, ends, right=True)
    is_shown = torch.zeros_like(counts, dtype=torch.bool).index_fill(0, image_of, True)
    if bool(is_shown.all()):
        return vision
    if not len(image_of):
        return None
    left_out = torch.where(is_shown, 0, counts // per_feature).cumsum(0)  # features dropped up to each image
    return replace(
        vision,
        pixel_values=vision.pixel_values[is_shown.repeat_interleave(counts)],
        grid_thw=vision.grid_thw[is_shown],
        feature_index=vision.feature_index - left_out[image_of],
    )


def decoder_inputs(model: Any, input_ids: Tensor, vision: VisionInputs | None) -> dict[str, Any]:
    """Returns the inputs that a vision-language model's text decoder takes in place of input_ids, [B, T].

    The vision tower runs once, over images and videos together.
    """
    embeddings: Tensor = model.get_input_embeddings()(input_ids)
    if vision is None:
        return {"inputs_embeds": embeddings}
    output = model.get_image_features(vision.pixel_values, vision.grid_thw, return_dict=True)
    features = torch.cat(output.pooler_output)[vision.feature_index].to(embeddings.dtype)
    mixed = embeddings.flatten(0, 1).index_copy(0, vision.feature_positions, features)
    inputs: dict[str, Any] = {"inputs_embeds": mixed.view_as(embeddings)}
    deepstack = getattr(output, "deepstack_features", None)
    if deepstack:  # Qwen3-VL adds features of earlier vision layers after the first text layers
        is_vision = torch.zeros(input_ids.numel(), dtype=torch.bool, device=input_ids.device)
        inputs["visual_pos_masks"] = is_vision.index_fill(0, vision.feature_positions, True).view(input_ids.shape)
        inputs["deepstack_visual_embeds"] = [torch.cat(layer)[vision.feature_index] for layer in deepstack]
    return inputs
