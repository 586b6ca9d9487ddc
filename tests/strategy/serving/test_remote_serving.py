import pytest
import torch

from lightrl.builtin.model import tiny_model
from lightrl.config import StrategyOptions
from lightrl.strategy.serving.remote_serving import RemoteServing
from lightrl.strategy.torch_native import SingleStrategy


class RecordingLink:
    def __init__(self):
        self.commands, self.sent = [], None

    def post(self, command):
        self.commands.append(command)

    def send_weights(self, weights, expected, bucket_bytes):
        self.sent = ({name: tensor.clone() for name, tensor in weights}, expected, bucket_bytes)


def test_each_sync_goes_over_the_link_with_its_proof():
    link, options = RecordingLink(), StrategyOptions(canary_every=0, sync_bucket_mb=1)
    strategy = SingleStrategy(seed=0, max_norm=1.0, micro_train_batch_size=1, train_batch_size=1, args=options)
    strategy.setup_distributed()
    strategy.serving = serving = RemoteServing(strategy, options, lambda: link)
    model, tokenizer = tiny_model()
    with pytest.raises(ValueError, match="needs the model"):
        serving.start("native", model=None, tokenizer=tokenizer, options=options)
    serving.start("vllm", model=model, tokenizer=tokenizer, options=options)
    assert serving.link is link
    strategy.set_global_step(4)
    report = strategy.sync_weights(model)
    assert link.commands == [{"do": "weights", "version": 0}, {"do": "weights", "version": 4}]
    weights, expected, bucket_bytes = link.sent
    assert weights.keys() == expected.keys()
    assert (report.version, bucket_bytes) == (4, 1 << 20)
    assert torch.equal(weights["model.norm.weight"], model.model.norm.weight)
    strategy.sleep_engine()
    strategy.close()
