"""Runs one part of a training that is saved, killed, resumed and resharded, on any number of ranks.

PART FOLDER: `whole` trains four steps and saves nothing. `killed` saves after steps 1 and 2 and is killed in step 3,
while rank 1 still writes the second checkpoint. `resumed` continues from the newest and must equal `whole` bit by bit.
`moved` reads what another number of ranks saved, trains a step, compares it with `whole`, and saves.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from lightrl.checkpoint import CheckpointDirectory
from lightrl.config import CheckpointConfig, StrategyOptions
from lightrl.strategy import strategy_class
from lightrl.strategy.saving import state_files
from lightrl.testing.tiny_training import fresh, parameters, same, train

STEPS = 4


def make(**checkpoint):
    name = "single" if os.environ.get("WORLD_SIZE", "1") == "1" else "fsdp"
    options = StrategyOptions(exact_batches=True, checkpoint=CheckpointConfig(**checkpoint))
    strategy = strategy_class(name)(0, 1.0, 1, 1, options)
    strategy.setup_distributed()
    return strategy


def save(strategy, policy, step, folder):
    strategy.set_global_step(step)
    strategy.save_ckpt(policy, str(folder / "checkpoints"), max_mem=0, client_state={"step": step})


def train_from(strategy, policy, first):
    return [
        (result.loss, result.grad_norm) for result in (train(strategy, policy, step) for step in range(first, STEPS))
    ]


def run_whole(folder):
    strategy = make()
    policy, _ = fresh(strategy)
    found = train_from(strategy, policy, 0)
    whole = parameters(strategy, policy)
    if strategy.comm.is_main:
        torch.save({"found": found, "parameters": whole}, folder / "whole.pt")
    strategy.close()


def run_killed(folder):
    strategy = make(asynchronous=True)
    policy, _ = fresh(strategy)
    directory = CheckpointDirectory(folder / "checkpoints", keep=3)
    gathers = count_gathers()
    train(strategy, policy, 0)
    save(strategy, policy, 1, folder)
    strategy.saver.pending.wait()
    if strategy.comm.rank == 1:
        write_never()
    train(strategy, policy, 1)
    save(strategy, policy, 2, folder)  # waits for the first
    assert directory.steps() == [1], directory.steps()
    assert gathers == [], gathers  # every rank wrote its own rows
    train(strategy, policy, 2)  # goes on while rank 1 writes, and the others have written
    strategy.saver.poll()
    assert directory.steps() == [1], directory.steps()
    strategy.comm.barrier()
    sys.stdout.write("killed while writing\n")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def write_never():
    state_files.save_tensors = lambda *_: threading.Event().wait()


def count_gathers():
    """Names of the collectives that gather weights for a checkpoint: full_tensor, and the buckets of a weight sync."""
    calls = []
    original = DTensor.full_tensor
    threshold = 256  # elements: less is a norm

    def full_tensor(self, *args, **kwargs):
        if self.numel() > threshold:
            calls.append("full_tensor")
        return original(self, *args, **kwargs)

    DTensor.full_tensor = full_tensor
    return calls


def run_resumed(folder):
    strategy = make(asynchronous=True)
    policy, _ = fresh(strategy, seed=7)
    path, client_state = strategy.load_ckpt(policy, str(folder / "checkpoints"))
    assert (path.name, client_state) == ("step-000001", {"step": 1})
    found = train_from(strategy, policy, 1)
    whole = torch.load(folder / "whole.pt", weights_only=True)
    assert found == whole["found"][1:], (found, whole["found"])
    same(parameters(strategy, policy), whole["parameters"])
    check_errors_reach_every_rank(strategy, policy, folder)
    strategy.close()


def check_errors_reach_every_rank(strategy, policy, folder):
    """A full disk on rank 1: the next update raises on all; the last checkpoint still counts; a later save works."""
    original = state_files.save_tensors

    def full(*_):
        raise OSError(28, "No space left on device")

    if strategy.comm.rank == 1:
        state_files.save_tensors = full
    save(strategy, policy, 4, folder)
    assert strategy.saver.pending is not None
    strategy.saver.pending.wait()
    try:
        train(strategy, policy, 4)
    except (OSError, RuntimeError) as error:  # the latter on the other rank
        assert "No space left on device" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    state_files.save_tensors = original
    assert CheckpointDirectory(folder / "checkpoints", keep=3).steps() == [1]
    save(strategy, policy, 2, folder / "again")
    strategy.close()  # waits
    assert CheckpointDirectory(folder / "again" / "checkpoints", keep=3).steps() == [2]


def run_moved(folder):
    strategy = make()
    policy, _ = fresh(strategy, seed=7)
    path, client_state = strategy.load_ckpt(policy, str(folder / "checkpoints"))
    step = client_state["step"]
    assert path.name == f"step-{step:06d}"
    result = train(strategy, policy, step)
    wanted = torch.load(folder / "whole.pt", weights_only=True)["found"][step]
    torch.testing.assert_close((result.loss, result.grad_norm), wanted, atol=1e-6, rtol=1e-5)
    save(strategy, policy, step + 1, folder)
    written = list((folder / "checkpoints" / f"step-{step + 1:06d}").glob("model-rank*.safetensors"))
    assert len(written) == strategy.comm.world
    strategy.close()


if __name__ == "__main__":
    {"whole": run_whole, "killed": run_killed, "resumed": run_resumed, "moved": run_moved}[sys.argv[1]](
        Path(sys.argv[2])
    )
    sys.stdout.write("all checked\n")
