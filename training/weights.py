"""The weights under training as one model that can be evaluated and saved, however training keeps them.

Training may divide the parameters over the ranks (FSDP), and may keep a moving average of them, which is what is
evaluated and published. Both are made whole in a second model, which exists only where one of them is in use.
"""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel


class TrainedWeights:
    """The parameters of the model under training. Every rank makes the same calls: parts are gathered from all.

    Args:
        model: The model under training, prepared and unwrapped.
        whole: The same model as it was before it was prepared, on the same device; None if it still is whole.
        ema_decay: The moving average's weight of the past, from 0 to below 1; 0 keeps no average.
        average: The average to continue, by name; None begins it at the parameters.

    Attributes:
        parameters: The parameters, each once, by name.
        average: Their moving average, divided like them; None without one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        whole: PreTrainedModel | None,
        ema_decay: float,
        average: Mapping[str, torch.Tensor] | None,
    ) -> None:
        self.model = model
        self.whole = whole
        self.ema_decay = ema_decay
        self.parameters = dict(model.named_parameters())
        self.average: dict[str, torch.Tensor] | None = None
        if ema_decay:
            self.average = {
                name: parameter.detach().clone() if average is None else divide_like(parameter, average[name])
                for name, parameter in self.parameters.items()
            }

    @torch.no_grad()
    def update_average(self, update: int) -> None:
        """Move the average towards the parameters after an update.

        Its decay is min(ema_decay, (1 + update) / (10 + update)): the first weights, which are noise, are soon
        forgotten.
        """
        if self.average is None:
            return
        decay = min(self.ema_decay, (1 + update) / (10 + update))
        torch._foreach_lerp_(list(self.average.values()), list(self.parameters.values()), 1 - decay)

    def as_trained(self) -> PreTrainedModel:
        """Return a whole model of the parameters as they are."""
        divided = any(isinstance(parameter, DTensor) for parameter in self.parameters.values())
        return self._fill(self.parameters) if divided else self.model

    def as_published(self) -> PreTrainedModel:
        """Return a whole model of the moving average, or of the parameters if there is none."""
        return self.as_trained() if self.average is None else self._fill(self.average)

    def whole_average(self) -> dict[str, torch.Tensor] | None:
        """Return the average by name, whole and on the host."""
        if self.average is None:
            return None
        return {name: gathered(tensor).cpu() for name, tensor in self.average.items()}

    @torch.no_grad()
    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
        assert self.whole is not None
        for name, parameter in self.whole.named_parameters():
            parameter.copy_(gathered(tensors[name]))
        return self.whole


def divide(model: PreTrainedModel) -> None:
    """Divide a model's parameters over all ranks (FSDP2), by its own plan: layers, and what depths share, are units.

    A unit's parameters are whole on every rank only while it is used; those of no unit, the embeddings, from their
    first use to the end of the backward pass.
    """
    patterns = [re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in model.fsdp_plan]
    units = [module for name, module in model.named_modules() if any(one.fullmatch(name) for one in patterns)]
    for unit in reversed(units):  # inner ones first
        fully_shard(unit)
    fully_shard(model)


def gathered(value: Any) -> Any:
    """Return a tensor of which each rank has a part as the whole tensor; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def divide_like(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole tensor on the device of a parameter, and divided over the ranks as that is."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's `state_dict` with whole tensors on the host."""
    state = optimizer.state_dict()
    moments = {
        number: {name: _on_host(gathered(value)) for name, value in of_parameter.items()}
        for number, of_parameter in state["state"].items()
    }
    return {**state, "state": moments}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the moments of what `whole_optimizer_state` returned into an optimizer whose parameters may be divided.

    Its settings stay what it was made with: the arguments of a continued run may have changed.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = copy.copy(state["state"])
    for number, of_parameter in moments.items():
        parameter = parameters[number]
        moments[number] = {
            name: divide_like(parameter, value) if value.shape == parameter.shape else value
            for name, value in of_parameter.items()
        }
    optimizer.load_state_dict({**state, "state": moments})
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value
