"""The reference: the frozen model that a policy is compared with, and its syncs with the policy (--reference.*)."""

from __future__ import annotations

from torch import nn

from lightrl.models.lora import WithoutAdapters
from lightrl.strategy.weight_mixing import mix_into
from lightrl.trainers.fit import Trainer
from lightrl.trainers.observer import Observer
from lightrl.trainers.run import load_start_policy

_FOLDER = "reference"  # in a checkpoint


def prepare_reference(trainer: Trainer, policy: nn.Module) -> nn.Module:
    """Returns the frozen reference: the policy without its adapters, or the model that the run starts from.

    Call it after the policy was prepared, or rank 0 would hold both models whole, and before resume(), which reads a
    reference that has been synced.
    """
    run = trainer.run
    if run.config.lora.path:
        run.strategy.print(
            "The reference is the model without the adapter of --lora.path. To compare with the adapter, give the "
            "model that it is merged into as --model (a run has it as final/), and --lora.rank for a new adapter."
        )
    if run.config.lora.is_on:
        return WithoutAdapters(policy)
    with run.strategy.comm.phase("loading the reference model", local=True):
        start = load_start_policy(run, is_reference=True)
    reference = run.strategy.prepare_frozen(start)
    if run.config.reference.sync_every:
        trainer.observers.append(ReferenceSync(trainer, policy, reference))
    if run.checkpoint is not None:
        _continue(trainer, reference)
    return reference


def _continue(trainer: Trainer, reference: nn.Module) -> None:
    """Lets resume() read the checkpoint's reference, even if it is not synced any more; says so if there is none."""
    run, comm = trainer.run, trainer.strategy.comm
    assert run.checkpoint is not None
    if comm.broadcast_object(comm.is_main and (run.checkpoint / _FOLDER).is_dir()):
        trainer.companions[_FOLDER] = reference
        if not run.config.reference.sync_every:
            run.strategy.print(f"The reference stays that of {run.checkpoint}: --reference.sync_every is 0.")
    elif run.config.reference.sync_every:
        run.strategy.print(f"{run.checkpoint} holds no reference: it starts as --model {run.config.model}.")


class ReferenceSync(Observer):
    """Moves the reference to or towards the policy after every --reference.sync_every steps."""

    def __init__(self, trainer: Trainer, policy: nn.Module, reference: nn.Module) -> None:
        self._trainer, self._policy, self._reference = trainer, policy, reference

    def after_step(self, step: int) -> None:
        """Syncs the reference if that is due; from the first step on, checkpoints hold it."""
        trainer, options = self._trainer, self._trainer.config.reference
        trainer.companions[_FOLDER] = self._reference  # only now, as the checkpoint that was read may have had none
        if step % options.sync_every:
            return
        with trainer.timed("reference_sync", "reference sync"):
            mix_into(self._reference, self._policy, options.mixup, trainer.strategy)
        if options.mixup == 1:  # a mixture may follow every step
            trainer.strategy.print(f"step {step}: the reference is now a copy of the policy")
