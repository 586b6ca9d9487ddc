"""Checks that ranks which split the tokens of prompts with images (--sp_size) give the results of one process.

It runs on several ranks, with a family of models and the flags of train_grpo.py.
"""

import sys
from types import SimpleNamespace

import torch
from split_program import compare
from tiny_vlm import IMAGE, VIDEO, checkered, frames, tiny_media, tiny_model

from lightrl.config import GRPOConfig, parse_config
from lightrl.metrics import Statistics
from lightrl.models.critic import ActorCritic, Critic, ValueHead
from lightrl.models.policy import Policy, response_batch
from lightrl.sharing.model import attach_sharing, share_by_itself
from lightrl.sharing.tree import SharedBatch, share
from lightrl.strategy import create_strategy

TEXT = "what is to be seen here "
RED, BLUE = checkered(60, 90, seed=1), checkered(60, 90, seed=2)
PROMPTS = [  # text, images, videos
    (f"{TEXT}{IMAGE}?", [RED], []),
    (f"{TEXT}{IMAGE}{IMAGE}", [RED, BLUE], []),
    (f"{VIDEO}{TEXT}{IMAGE}", [BLUE], [frames(3, 40, 40)]),
    (f"{TEXT}and nothing else", [], []),
]


def value_head():
    head = ValueHead(64)
    torch.nn.init.normal_(head.weight)
    return head


MODELS = {
    "policy": lambda family: Policy(tiny_model(family)),
    "actor critic": lambda family: ActorCritic(tiny_model(family), value_head()),
    "critic": lambda family: Critic(tiny_model(family).model, value_head()),
}


def batches_of_ranks(family):
    """Of rank 0 images on either half and text alone, of rank 1 images on one half and a video."""
    media, draw = tiny_media(family), torch.Generator().manual_seed(0)

    def batch(*samples):
        """Takes pairs of a prompt and the length of a response."""
        encoded = [
            media.encode(media.processor.tokenizer.encode(text), images, videos)
            for text, images, videos in (PROMPTS[index] for index, _ in samples)
        ]
        lengths = (length for _, length in samples)
        responses = [torch.randint(2, 90, (length,), generator=draw).tolist() for length in lengths]
        pairs = [(prompt.token_ids, response) for prompt, response in zip(encoded, responses, strict=True)]
        return response_batch(pairs, encoded=encoded)

    both = batch((0, 3), (0, 5), (1, 4), (1, 2))
    text = batch((3, 4), (3, 2))
    first_half = batch((0, 2), (3, 7), (3, 6), (3, 9))
    video = batch((2, 3), (2, 4), (3, 2))
    assert {len(one.input_ids) % 2 for one in (both, text, first_half, video)} == {0, 1}
    assert int(first_half.vision.feature_positions.max()) < len(first_half.input_ids) // 2
    return [[both, text], [first_half, video]]


def prepared(strategy, family, kind, way):
    """Returns the model alone and the split one."""
    alone, model = (seeded(MODELS[kind], family) for _ in range(2))
    model = strategy.prepare_model(model)
    if way == "auto":
        trainer = SimpleNamespace(policy=model, strategy=strategy, statistics=Statistics(), batches="")
        share_by_itself(trainer)
        assert trainer.batches
    elif way == "asked":
        attach_sharing(model, strategy)
    return alone, model


def seeded(build, family):
    torch.manual_seed(0)
    return build(family)


def check_model(strategy, family, kind, way) -> None:
    """Outputs of this rank's micro-batches, and gradients of all ranks'."""
    alone, model = prepared(strategy, family, kind, way)
    everyones = batches_of_ranks(family)
    mine = everyones[strategy.comm.rank]
    given = [share(batch) for batch in mine] if way == "asked" else mine
    assert way != "asked" or any(isinstance(batch, SharedBatch) for batch in given)
    compare(strategy, alone, model, everyones=everyones, given=given, atol=1e-5)
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    assert any("visual" in name and gradient is not None and gradient.any() for name, gradient in gradients.items())


def main() -> None:
    family, *flags = sys.argv[1:]
    strategy = create_strategy(parse_config(GRPOConfig, flags))
    strategy.setup_distributed()
    for kind in MODELS:
        for way in ("whole", "auto", "asked"):
            print(family, kind, way, flush=True)
            check_model(strategy, family, kind, way)
    strategy.close()


if __name__ == "__main__":
    main()
