"""DeepSpeed: ZeRO 0 (replicas), 1 (optimizer states sharded), 2 (gradients too) and 3 (parameters too).

The model stays as it is; DeepSpeed's engine exists beside it and is driven from here. Parameters and optimizer states
are float32 at every stage, and bfloat16 is torch's autocast, as in every other strategy: with DeepSpeed's own bfloat16,
ZeRO-0 takes an empty first step of Adam, and the other stages round the weights that they start from.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import warnings
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.models.per_sequence import RUNS_APART
from lightrl.strategy.layout.materialize import broadcast_buffers, broadcast_from_main
from lightrl.strategy.layout.meshes import ensure_process_group
from lightrl.strategy.layout.zero import ENGINE, DataclassOutputs, ParametersToPartition, ZeroLayout
from lightrl.strategy.layout.zero_gradients import OrderedGradients, fill_up
from lightrl.strategy.optim.value_head import drop_frozen_gradients, steps_left
from lightrl.strategy.torch_native import TorchStrategy

_OUTPUTS = "_deepspeed_outputs"  # a key of the model's __dict__, like ENGINE
_OFTEN_LEFT = ("pre_bwd_fn", "post_bwd_fn", "applied_pre_backward_ref_cnt")  # what destroy() leaves on the modules


class DeepSpeedStrategy(TorchStrategy):
    """Trains at the stage of --deepspeed.zero_stage; a model gets its engine when its optimizer is registered."""

    steps_whole_matrices = False
    own_options = ("deepspeed",)
    _deepspeed: Any  # the package, which only a joined world can import

    def __init__(
        self, seed: int, max_norm: float, micro_train_batch_size: int, train_batch_size: int, args: Any | None = None
    ) -> None:
        super().__init__(seed, max_norm, micro_train_batch_size, train_batch_size, args)
        self.options.deepspeed.check()
        if self.options.compile:
            raise ValueError(
                "--compile does not go with --strategy deepspeed. Use single, ddp or fsdp, or leave it out."
            )
        if importlib.util.find_spec("deepspeed") is None:
            raise ImportError('--strategy deepspeed needs DeepSpeed. Install it: pip install "lightrl[deepspeed]"')
        self.stage = self.options.deepspeed.zero_stage

    def setup_distributed(self, timeout: timedelta | None = None, num_gpu_per_node: int = 8) -> None:
        """Joins the world that torchrun describes and imports DeepSpeed in it."""
        super().setup_distributed(timeout, num_gpu_per_node)
        if (
            self.options.deepspeed.cpu_adam
            and self.device.type != "cpu"
            and not self.options.deepspeed.offload_optimizer
        ):
            raise ValueError("--deepspeed.cpu_adam steps in host memory: add --deepspeed.offload_optimizer True.")
        self.comm = ensure_process_group(self.comm, self.device)
        self._deepspeed = load_deepspeed(self.device)
        self.layout = ZeroLayout(
            self.comm,
            self._deepspeed,
            device=self.device,
            bucket_bytes=self.options.sync_bucket_mb << 20,
            cpu_adam=self.options.deepspeed.cpu_adam,
        )

    def close(self) -> None:
        """Leaves the process group, and clears DeepSpeed's references to its own groups, which would outlive it."""
        super().close()
        # As in destroy_process_group of https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/comm/comm.py
        if hasattr(self, "_deepspeed") and not self._deepspeed.comm.is_initialized():
            self._deepspeed.utils.groups._release_process_group_references()

    @property
    def averaging_ranks(self) -> int:
        """All ranks, over which DeepSpeed averages."""
        return self.comm.world

    @property
    def materializes_weights(self) -> bool:
        """Only rank 0 loads weights; the others receive them."""
        return self.comm.is_main

    # ---- Models and their engines ------------------------------------------------------------------------------

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Copies rank 0's weights (at stage 3, shards of them) to every rank; other ranks may pass a meta model."""
        self.set_up_computation(model)
        if self.stage < 3:
            broadcast_from_main(model, self.device, self.comm)
            return model
        if any(RUNS_APART in module.__dict__ for module in model.modules()):
            raise _cannot_gather(model)
        whole = ParametersToPartition(model, self.device)
        self._deepspeed.zero.Init(module=whole, config_dict_or_path=self._config())  # rank 0's, broadcast
        broadcast_buffers(model, self.device, self.comm)
        model.__dict__[_OUTPUTS] = DataclassOutputs(model)
        self._start_engine(model, None)  # the model may run before it has an optimizer, or never get one
        return model

    def register(self, model: nn.Module, optimizer: Optimizer, scheduler: Any = None) -> None:
        """Starts DeepSpeed's engine around the model and its optimizer."""
        if optimizer.state:
            raise ValueError("The optimizer has taken steps before DeepSpeed had it. Prepare first, then train.")
        frozen = [group for group in optimizer.param_groups if steps_left(group)]
        for group in frozen:
            self._freeze_in_warmup(group)
        self._start_engine(model, optimizer)
        if frozen and self.stage > 0:
            optimizer.register_step_pre_hook(_drop_frozen)
        super().register(model, optimizer, scheduler)

    def _freeze_in_warmup(self, group: dict[str, Any]) -> None:
        if self.options.deepspeed.offload_optimizer:
            raise ValueError(
                "A critic warm-up cannot go with --deepspeed.offload_optimizer True: turn one of them off."
            )
        for parameter in group["params"] if self.stage > 0 else []:
            parameter.register_hook(partial(_zero_in_warmup, group))

    def _start_engine(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        _stop_engine(model)
        was_training = model.training
        engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._config(), dist_init_required=False
        )
        model.train(was_training)
        model.__dict__[ENGINE] = engine
        if self.stage == 2:
            engine.gradients = OrderedGradients(model, engine)
        if _OUTPUTS in model.__dict__:
            engine.restore_hook = model.register_forward_hook(model.__dict__[_OUTPUTS].restore)

    def _config(self) -> dict[str, Any]:
        chosen = self.options.deepspeed
        host = {"device": "cpu", "pin_memory": self.device.type == "cuda"}
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": (chosen.bucket_mb << 20) // 4,  # in elements
            "allgather_bucket_size": (chosen.bucket_mb << 20) // 4,
            "memory_efficient_linear": False,  # would replace torch's linear in the whole process
        }
        zero |= {"offload_optimizer": host} if chosen.offload_optimizer else {}
        zero |= {"offload_param": host} if chosen.offload_param else {}
        zero |= {"stage3_param_persistence_threshold": chosen.param_persistence_threshold} if self.stage == 3 else {}
        return {
            "train_micro_batch_size_per_gpu": 1,  # only used to count samples
            "gradient_accumulation_steps": 1,
            # step() ends an accumulation after any number of micro-batches. Stage 0 does not call step().
            "managed_gradient_accumulation": self.stage == 0,
            "gradient_clipping": 0.0,  # set at each step
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": False},
            "steps_per_print": 1 << 40,
        }

    # ---- Training ----------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module, **kwargs: Any) -> Optimizer:
        """Builds the optimizer of the options or, with --deepspeed.cpu_adam, DeepSpeed's own."""
        if not self.options.deepspeed.cpu_adam:
            return super().create_optimizer(model, **kwargs)
        plain = super().create_optimizer(model, **{**kwargs, "fused": False})
        settings = {name: plain.defaults[name] for name in ("betas", "eps")}
        kept = ("params", "weight_decay", "lr", "lr_scale")
        groups = [{name: group[name] for name in kept} for group in plain.param_groups]
        optimizer: Optimizer = self._deepspeed.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        return optimizer

    def run_backward(self, loss: Tensor, model: nn.Module) -> None:
        """Runs the backward with DeepSpeed's engine, which reduces gradients at stages 1 to 3."""
        engine = _engine_of(model)
        if self.stage == 0:
            engine.set_gradient_accumulation_boundary(False)  # nothing is reduced before reduce_gradients()
        else:
            # engine.forward() would do this with hooks on the outputs, but here the model is called, not the engine:
            # https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py
            engine.optimizer.clear_backward_seen_flag()
            engine.optimizer.set_gradient_accumulation_boundary(False)  # this is in step()
            engine.optimizer.backward_prologue()
            engine.optimizer.enter_backward()
        engine.backward(loss, scale_wrt_gas=False)
        if self.stage == 2:
            engine.gradients.finish_backward()

    def reduce_gradients(self, model: nn.Module, parameters: list[Tensor]) -> None:
        """Reduces gradients at stage 0; at the other stages, the backward or step() reduces them."""
        engine = _engine_of(model)
        engine.set_gradient_accumulation_boundary(True)
        engine.allreduce_gradients()

    def apply_gradients(self, optimizer: Optimizer, model: nn.Module, divisor: float) -> tuple[float, bool]:
        """Lets DeepSpeed divide, clip and step at stages 1 to 3."""
        if self.stage == 0:
            return super().apply_gradients(optimizer, model, divisor)
        engine = _engine_of(model)
        zero = engine.optimizer
        zero.clip_grad = self.max_norm or 0.0
        if self.stage == 1:
            fill_up(parameter for group in zero.bit16_groups for parameter in group)
        zero.override_loss_scale(divisor)  # what the gradients are divided by
        engine.step()  # skips on every rank, and clears up, if the norm over all ranks is not finite
        zero.override_loss_scale(1.0)  # it would also multiply the next loss
        grad_norm = float(engine.get_global_grad_norm())
        stepped = not zero.overflow
        assert stepped == math.isfinite(grad_norm), (stepped, grad_norm)
        return grad_norm, stepped


def load_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for this device, inside the existing process group."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # the GPU that it makes the current one
    # DeepSpeed 0.19.8 calls these at every step by names that torch 2.13 changed; a later version will not need this.
    warnings.filterwarnings("ignore", ".*(reduce_scatter|all_gather_into)_tensor.* is deprecated", FutureWarning)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)  # it warns about every optimizer but its own
    if device.type == "cpu":  # shared-memory collectives would now be compiled for minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    return deepspeed


def _engine_of(model: nn.Module) -> Any:
    engine = model.__dict__.get(ENGINE)
    if engine is None or not hasattr(engine.optimizer, "param_groups"):
        raise ValueError("This model has no optimizer yet. Pass (model, optimizer, scheduler) to prepare() first.")
    return engine


def _stop_engine(model: nn.Module) -> None:
    engine = model.__dict__.pop(ENGINE, None)
    if engine is None:
        return
    engine.destroy()
    hook = getattr(engine, "restore_hook", None)
    if hook is not None:
        hook.remove()
    for module in model.modules():  # they belong to the old engine, but a new one would keep them
        for name in _OFTEN_LEFT:
            module.__dict__.pop(name, None)


# ---- Critic warm-up: frozen groups must neither move nor count in ZeRO's norm, which is over all gradients -------


def _cannot_gather(model: nn.Module) -> ValueError:
    """Returns the error for a model whose layers run a different number of times on each rank: some would wait."""
    return ValueError(
        f"--deepspeed.zero_stage 3 gathers the weights of a layer when it runs, and {type(model).__name__} has layers "
        "that run once for each sequence of a pack. Use --deepspeed.zero_stage 2, or --strategy fsdp, which shards too."
    )


def _zero_in_warmup(group: dict[str, Any], gradient: Tensor) -> Tensor | None:
    return torch.zeros_like(gradient) if steps_left(group) else None


def _drop_frozen(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    drop_frozen_gradients(optimizer)
