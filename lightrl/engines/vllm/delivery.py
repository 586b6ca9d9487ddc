"""Passes the tensors of a weight sync to vLLM's loader, one by one in effect, and keeps account of the results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lightrl.engines.base import NamedTensors
from lightrl.engines.weights.account import Shape, WeightAccount
from lightrl.engines.weights.names import checkpoint_pairs
from lightrl.engines.weights.placement import Placement
from lightrl.models.router_biases import is_router_bias

_STACKED = re.compile(r"\.experts\.\w+_proj$")  # all experts of a layer as one tensor, as in transformers' memory


class Delivery:
    """Feeds (HF name, whole tensor) pairs to a loader; the account records each that is refused or ignored."""

    def __init__(
        self,
        load: Callable[[NamedTensors], Iterable[str] | None],
        account: WeightAccount,
        placement: Placement,
        *,
        can_load_one: bool = True,
        converted: PreTrainedModel | None = None,
    ) -> None:
        """Makes a delivery to a loader.

        Args:
            can_load_one: whether the loader may be called with one pair while another call is running.
            converted: the trainer's architecture, if the loader takes the pairs in the form of its checkpoint only.
        """
        self._load = load
        self._account = account
        self._placement = placement
        self._can_load_one = can_load_one
        self._converted = converted
        self._current = ""
        self._is_over = False
        self._broken: BaseException | None = None
        self.loaded: set[str] = set()  # the engine's own names, as far as its loader reports them
        self.unread: list[str] = []  # tensors that are not compared because their place is unknown

    def run(self, weights: NamedTensors) -> None:
        """Consumes all pairs even if one does not fit, because they may come from collectives."""
        stream = (
            iter(weights) if self._converted is None else checkpoint_pairs(self._converted, self._accepted(weights))
        )
        while not self._is_over:
            before = self._account.num_events
            try:
                self.loaded.update(self._load(self._checked(stream)) or ())
            except Exception as error:
                if self._broken is not None:
                    raise self._broken from None
                self._account.add_problem(f"{self._current} was refused: {_first_line(error)}")
            if not self._is_over and before == self._account.num_events:
                self._account.add_problem(f"the loader stopped at {self._current or 'the first parameter'}")
                for _ in self._checked(stream):
                    pass

    def _accepted(self, weights: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in weights if self._account.accept(name, tensor))

    def _checked(self, stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while True:
            try:
                name, tensor = next(stream)
            except StopIteration:
                self._is_over = True
                return
            except BaseException as error:
                self._broken = error
                raise
            if self._converted is not None or self._account.accept(name, tensor):
                self._current = name
                if self._remember(name, tensor) or not self._can_load_one:
                    yield name, tensor
                else:
                    self._load_one(name, tensor)

    def _remember(self, name: str, tensor: Tensor) -> bool:
        places = self._placement.places(name, tuple(tensor.shape))
        for place in places or ():
            self._account.remember_values(name, tensor, self._placement.parameters[place.parameter], place)
        if places is None:
            self.unread.append(name)
        return places is not None

    def _load_one(self, name: str, tensor: Tensor) -> None:
        """Loads a tensor alone, which shows whether the loader ignores its name."""
        try:
            loaded = self._load([(name, tensor)])
        except Exception as error:
            self._account.add_problem(f"{name} was refused: {_first_line(error)}")
            return
        if loaded is not None and not set(loaded):
            self._account.add_problem(f"{name} was ignored by the engine's loader")
        self.loaded.update(loaded or ())


def knows_stacked_experts(load: Callable[[NamedTensors], object], shapes: Mapping[str, Shape], like: Tensor) -> bool:
    """Returns whether a loader has a parameter for all experts of a layer, where the trainer sends such a tensor.

    It is tried with zeros, so a weight sync must follow. Loaders of DeepSeek's family know only single experts.
    """
    name = next(filter(_STACKED.search, shapes), None)
    if name is None:
        return True
    try:
        load([(name, torch.zeros((), dtype=like.dtype, device=like.device).expand(shapes[name]))])
    except KeyError:  # the loader has no such parameter
        return False
    except Exception:  # the load itself reports it
        return True
    return True


def lost_biases(buffers: Iterable[tuple[str, Tensor]], sent: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Describes the router biases for which the engine has no place, unless they are zero."""
    names = {name for name, _ in sent}
    return [
        f"the engine has no {name}, which is not zero: the routers of DeepSeek's family have it in vLLM only if the "
        "model's config has topk_method 'noaux_tc'"
        for name, buffer in buffers
        if name not in names and is_router_bias(name) and bool(buffer.any())
    ]


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
