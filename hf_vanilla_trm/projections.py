"""Linear maps whose matrices are used outside of their modules, where that is faster."""

from torch import nn


def is_plain(linear: nn.Module) -> bool:
    """Whether `x @ linear.weight.T + linear.bias` is what a call of the module computes, with nothing around it.

    It is not where a library has put something of its own in the place of the module, its weight or its call: an
    adapter, a quantised or divided weight, a hook.
    """
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return False
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    if any(hooks) or hasattr(linear, "_hf_hook"):
        return False
    weight = linear.weight
    is_whole = weight.shape == (linear.out_features, linear.in_features)
    return is_whole and type(weight) is nn.Parameter and weight.device.type != "meta"
