import torch

from lightrl.data.example_packing import pack_examples, pair_sequences
from lightrl.records import Answer, EncodedPrompt, Example, Prompt


def answer(*response: int, mask: tuple[bool, ...] | None = None) -> Answer:
    return Answer(prompt_ids=(1, 2), response_ids=response, loss_mask=mask or (True,) * len(response))


def pair(position: int, chosen: Answer, rejected: Answer) -> Example:
    return Example(index=7, where="data.jsonl:8", answers=(chosen, rejected), position=position)


def test_answers_are_packed_with_what_is_trained() -> None:
    batch = pack_examples(
        [Example(index=0, where="", answers=(answer(5, 6, 7, mask=(True, False, True)),), position=4)]
    )
    assert batch.input_ids.tolist() == [1, 2, 5, 6, 7]
    assert batch.targets.tolist() == [5, 6, 7]
    assert batch.score_index.tolist() == [1, 2, 3]
    assert batch.loss_mask.tolist() == [True, False, True]
    assert batch.keys == ((4, 0),)
    assert batch.temperature == pack_examples([]).temperature == 1.0  # nobody sampled the answers


def test_the_answers_of_a_pair_are_found_again() -> None:
    # Shortest first: position 3's chosen (1), 0's rejected (2), 3's rejected (3), 0's chosen (4 tokens).
    examples = [pair(3, answer(5), answer(5, 6, 7)), pair(0, answer(5, 6, 7, 8), answer(5, 6))]
    batch = pack_examples(examples)
    assert batch.keys == ((3, 0), (0, 1), (3, 1), (0, 0))
    chosen, rejected = pair_sequences(batch)
    assert (chosen.tolist(), rejected.tolist()) == ([3, 0], [1, 2])  # pairs in the order of positions 0, 3


def test_no_example_is_a_dummy_without_pairs() -> None:
    batch = pack_examples([])
    chosen, rejected = pair_sequences(batch)
    assert len(chosen) == len(rejected) == 0
    assert chosen.dtype == torch.int64
    assert not batch.loss_mask.any()


def test_the_prompts_of_a_pair_are_encoded_apart() -> None:
    """Two conversations may differ before the first trained token."""

    def encode(prompt: Prompt) -> EncodedPrompt:
        places = torch.arange(len(prompt.token_ids))
        none = torch.zeros(0, dtype=torch.int64)
        return EncodedPrompt(
            token_ids=prompt.token_ids, positions=places.expand(3, -1), rope_delta=0, feature_positions=none
        )

    longer = Answer(prompt_ids=(1, 3, 2), response_ids=(6,), loss_mask=(True,))
    batch = pack_examples([pair(0, answer(5), longer)], encode=encode)
    assert batch.input_ids.tolist() == [1, 2, 5, 1, 3, 2, 6]
