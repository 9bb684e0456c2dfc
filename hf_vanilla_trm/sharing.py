"""Let a trained model share parameters across its layers, or give each of its layers its own again.

How a stack shares is said by the config (`parameter_sharing`, `num_unique_layers`, `sharing_order`) and done by
`VanillaTrmStack`. Here, one arrangement becomes another.
"""

import copy
import re
from typing import Any, TypeVar

import torch

from .modeling_vanilla_trm import VanillaTrmPreTrainedModel

Model = TypeVar("Model", bound=VanillaTrmPreTrainedModel)


def share_parameters(
    model: Model, parameter_sharing: str, *, num_unique_layers: int = 1, sharing_order: str = "sequence"
) -> Model:
    """Return a copy in which layers share; what they share is the mean of what the depths that share it had.

    The mean is a starting point for fine-tuning: it computes something else than the model did. (With "none" there is
    no mean to take, and the copy computes the same.)

    Args:
        model: Any of the package's models, sharing or not, also one that was loaded with `trust_remote_code`.
        parameter_sharing: See `VanillaTrmConfig`.
        num_unique_layers: Distinct layers of each stack.
        sharing_order: Which depth uses which.

    Raises:
        ValueError: One of the three breaks a rule of `VanillaTrmConfig`, or the model is of another type.
    """
    stacks = _stacks(model)
    if model.config.model_type != "vanilla_trm" or not stacks:
        raise ValueError(f"a {type(model).__name__} has no layers of vanilla_trm that could share their parameters")
    config = copy.deepcopy(model.config)
    config.parameter_sharing = parameter_sharing
    config.num_unique_layers = num_unique_layers
    config.sharing_order = sharing_order
    with torch.random.fork_rng(devices=[]):  # the first weights, all to be replaced, cost no random numbers
        copied: Any = type(model)(config)
    copied.to(device=model.device, dtype=model.dtype)
    outside = {name: tensor for name, tensor in model.state_dict().items() if not re.search(r"(^|\.)layers\.", name)}
    copied.load_state_dict(outside, strict=False)
    for stack, copied_stack in zip(stacks, _stacks(copied), strict=True):
        _average_layers(stack, copied_stack)
    if model.can_generate():
        copied.generation_config = copy.deepcopy(model.generation_config)
    result: Model = copied.train(model.training)
    return result


def unshare_parameters(model: Model) -> Model:
    """Return a copy in which every layer has parameters of its own, and which computes what the model does.

    Args:
        model: Any of the package's models.
    """
    return share_parameters(model, "none")


def _stacks(model: torch.nn.Module) -> list[Any]:
    """Encoder and decoder, known by what they can do: code that came with a model has classes of its own."""
    return [module for module in model.modules() if hasattr(module, "sublayers_at")]


@torch.no_grad()
def _average_layers(stack: Any, target: Any) -> None:
    """Fill each sub-module of `target` with the mean of those that `stack` uses at the same depths."""
    sources: dict[torch.nn.Module, list[dict[str, torch.Tensor]]] = {}
    for depth in range(target.num_layers):
        used = stack.sublayers_at(depth)
        for name, module in target.sublayers_at(depth).items():
            sources.setdefault(module, []).append(used[name].state_dict())
    for module, states in sources.items():
        mean = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}
        module.load_state_dict(mean)
