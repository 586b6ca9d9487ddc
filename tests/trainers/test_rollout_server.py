from lightrl.config import GRPOConfig
from lightrl.records import Prompt, Sample
from lightrl.roles import Role
from lightrl.trainers.rollout_server import _groups, _server_options


def sample(position, index):
    prompt = Prompt(index=0, text="", token_ids=(1,))
    return Sample(
        prompt=prompt,
        position=position,
        sample_index=index,
        response_ids=(),
        sampler_logprobs=(),
        versions=(),
        finish_reason="stop",
        text="",
    )


def test_a_group_has_the_samples_of_one_prompt():
    samples = [sample(0, 0), sample(0, 1), sample(2, 0)]
    groups = _groups(samples, [1.0, 0.0, 0.5], 4)
    assert [[item.key for item in group.samples] for group in groups] == [[(0, 0), (0, 1)], [(2, 0)]]
    assert [(group.rewards, group.step) for group in groups] == [((1.0, 0.0), 4), ((0.5,), 4)]
    assert _groups([], [], 0) == []


def test_a_server_has_the_run_options_without_a_trainer():
    config = GRPOConfig(rollout_ranks=2, strategy="deepspeed", engine_tp_size=2, temperature=0.7, output_dir="x")
    options = _server_options(config, Role(name="rollout", rank=1, num_trainers=1, num_rollout=2))
    assert (options.strategy, options.engine_tp_size, options.temperature) == ("ddp", 2, 0.7)
    assert (options.engine_sleep_level, options.canary_every) == (0, 0)
    assert options.output_dir != "x"
    alone = _server_options(config, Role(name="rollout", rank=0, num_trainers=3, num_rollout=1))
    assert alone.strategy == "single"
