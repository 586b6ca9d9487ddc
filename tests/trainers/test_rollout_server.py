from lightrl.config import GRPOConfig
from lightrl.roles import Role
from lightrl.trainers.rollout_server import _server_options


def test_a_server_has_the_run_options_without_a_trainer():
    config = GRPOConfig(rollout_ranks=2, strategy="deepspeed", engine_tp_size=2, temperature=0.7, output_dir="x")
    options = _server_options(config, Role(name="rollout", rank=1, num_trainers=1, num_rollout=2))
    assert (options.strategy, options.engine_tp_size, options.temperature) == ("ddp", 2, 0.7)
    assert (options.engine_sleep_level, options.canary_every) == (0, 0)
    assert options.output_dir != "x"
    alone = _server_options(config, Role(name="rollout", rank=0, num_trainers=3, num_rollout=1))
    assert alone.strategy == "single"
