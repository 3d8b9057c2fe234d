"""Linear layers whose weights are laid out once for oneDNN, which makes 2-16 rows on a CPU two to three times cheaper.

Wraps two private torch operators; knows nothing of models. The result is a linear layer's, and where the operators are
missing or do not fit, the stock one computes it.
"""

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_PACK_FOR_ROWS = 8  # the layout is chosen for about this many rows: a verification block
# Up to this many rows the plain weight was faster in trials on two AVX-512 cores; no recorded benchmark has it yet.
_PLAIN_ROWS = 3


class PrepackedLinear(nn.Module):
    """x [rows, in] -> [rows, out]. Keeps the plain weight beside the packed one only if `keep_plain`, for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, keep_plain: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # Not a buffer: an opaque layout that must not be moved, cast or saved.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACK_FOR_ROWS)
        self._bias = None if bias is None else bias.detach()
        self._plain = weight.detach() if keep_plain else None

    def forward(self, x: Tensor) -> Tensor:
        if self._plain is not None and x.numel() <= _PLAIN_ROWS * self.in_features:
            return nn.functional.linear(x, self._plain, self._bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


def can_prepack(weight: Tensor) -> bool:
    """Whether the operators exist and agree with the stock linear for weights like this one; tried, not guessed."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return False
    sample, x = weight.detach()[:16].clone(), torch.linspace(-1, 1, 2 * weight.shape[1]).view(2, -1)
    try:
        found = PrepackedLinear(sample, None)(x)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        logger.warning("linear weights are not prepacked, the stock linear serves: %s", str(error).split("\n")[0])
        return False
    if torch.allclose(found, nn.functional.linear(x, sample), rtol=1e-4, atol=1e-5):
        return True
    logger.warning("linear weights are not prepacked, the stock linear serves: the packed operator disagrees with it")
    return False


def prepack_linears(module: nn.Module) -> int:
    """Replace every nn.Linear below `module` by its prepacked twin; the number replaced.

    A weight tied to an embedding stays alive there, so it costs its memory twice; every other plain weight is freed.
    """
    children = ((parent, name, child) for parent in module.modules() for name, child in parent.named_children())
    linears = [(parent, name, child) for parent, name, child in children if type(child) is nn.Linear]
    if not linears or not can_prepack(linears[0][2].weight):
        return 0
    for parent, name, child in linears:
        setattr(parent, name, PrepackedLinear(child.weight, child.bias))
    return len(linears)
