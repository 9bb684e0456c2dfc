"""When a linear map's matrix may be used in its module's place: not where someone has changed the module."""

import pytest
from torch import nn

from hf_vanilla_trm.projections import is_plain

CHANGES = {
    "a hook": lambda linear: linear.register_forward_hook(lambda module, args, output: output + 1),
    "a hook before": lambda linear: linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
    "a call of its own": lambda linear: setattr(linear, "forward", lambda inputs: inputs[..., :4] * 3),
    "a parametrised weight": nn.utils.parametrizations.weight_norm,
    "a part of a weight": lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight[:3].detach())),
    "a weight without storage": lambda linear: linear.to("meta"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_not_plain(change):
    linear = nn.Linear(6, 4)
    assert is_plain(linear)
    CHANGES[change](linear)
    assert not is_plain(linear)
