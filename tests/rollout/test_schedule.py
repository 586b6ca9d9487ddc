"""What a run carries: whose tickets are whose, and a state that any number of ranks continues."""

from types import SimpleNamespace

import torch

from lightrl.comm import Comm
from lightrl.engines.base import Completion
from lightrl.engines.native.cache import LayerStorage
from lightrl.engines.native.kept_rows import KeptRow
from lightrl.records import Prompt
from lightrl.rollout.schedule import Schedule
from lightrl.rollout.scheduler import AsyncScheduler, Rules

PROMPTS = [Prompt(index=index, text="", token_ids=(1, index)) for index in range(5)]


def schedule(rank: int = 0, world: int = 1, engine_size: int = 1) -> Schedule:
    comm = Comm() if world == 1 else SimpleNamespace(rank=rank, world=world)
    rules = Rules(batch_size=2, max_staleness=1, over_issue=0.5)
    return Schedule(AsyncScheduler(rules), comm, PROMPTS, lambda ticket: ticket % 5, engine_size=engine_size)


def test_every_ticket_has_one_rank() -> None:
    for world, engine_size in ((1, 1), (3, 1), (4, 2), (4, 4)):
        ranks = [schedule(rank, world, engine_size) for rank in range(world)]
        owners = [[rank for rank, made in enumerate(ranks) if made.is_mine(ticket)] for ticket in range(12)]
        assert all(len(item) == 1 for item in owners)
        assert {item[0] for item in owners} == set(range(0, world, engine_size))  # the first ranks of the engines


def test_a_ticket_has_its_prompt() -> None:
    assert schedule().prompt(7).index == 2


def test_a_rank_opens_its_own_tickets_and_asks_where_all_of_them_are() -> None:
    asked: list[list[int]] = [[], []]
    for rank, tickets in enumerate(asked):
        made = schedule(rank, 2)
        made._index_at = lambda ticket, tickets=tickets: tickets.append(ticket) or 0
        made.open([4, 5, 6], 2, 0)
        assert sorted(made.journals) == [(ticket, index) for ticket in ([4, 6], [5])[rank] for index in range(2)]
    assert asked == [[4, 5, 6]] * 2  # a curriculum draws at each call


def test_a_saved_schedule_goes_on_at_another_number_of_ranks() -> None:
    made = schedule()
    made.open(made.scheduler.start(0), 2, 0)
    assert sorted(made.journals) == [(ticket, index) for ticket in range(3) for index in range(2)]
    made.scheduler.finish([0, 2])
    made.close([0, 2])
    made.scheduler.take((0, 2))
    state = made.state_dict()
    ranks = [schedule(rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [sorted(rank.journals) for rank in ranks] == [[], [(1, 0), (1, 1)]]
    assert ranks[1].journals[1, 0].start_version == 0
    assert [rank.scheduler.start(1) for rank in ranks] == [[3, 4]] * 2


def test_saving_frees_what_the_engine_keeps_of_unfinished_samples() -> None:
    """So that this run computes the tokens again, as one that continues the checkpoint does."""
    made = schedule()
    made.open([0], 1, 0)
    kept = KeptRow([LayerStorage(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))], 4)
    made.journals[0, 0].partials[0] = Completion(
        request_id=0,
        sample_index=0,
        prompt_token_ids=(1,),
        output_token_ids=(5,),
        logprobs=(0.0,),
        versions=(0,),
        finish_reason="abort",
        kept=kept,
    )
    made.state_dict()
    assert kept.is_empty


def test_tickets_are_dealt_out_in_turn() -> None:
    # Of 7 consecutive tickets 3 ranks have 7 // 3 + (rank < 7 % 3): 3, 2, 2.
    ranks = [schedule(rank, 3) for rank in range(3)]
    assert [sum(made.is_mine(ticket) for ticket in range(7)) for made in ranks] == [3, 2, 2]
