"""What a transformers model's attention computes, asked of its own code by one pass of one token.

Refuses, with the property in the way, whatever attention over paged keys and values would compute differently. Knows
nothing of pages. What rows see is read from the mask the model asks for, not guessed from its configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from outrider_kernels.supported_models import UnsupportedModel

_PROBE = "outrider_probe"
# Arguments of the attention interface that change nothing about what a pass without dropout computes.
_HARMLESS = {"dropout", "is_causal", "position_ids", "position_embeddings", "sliding_window", "use_cache"}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Attention:
    """`windows`: how many rows a row sees in each layer, itself among them; None where it sees all before it."""

    windows: tuple[int | None, ...]
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Mask:
    """Travels through the model's code in the place of a mask."""

    sees: MaskFunction  # (batch, head, row, key) indices -> bool


class _Probe:
    def __init__(self, length: int) -> None:
        self._length = length
        self.windows: dict[int, int | None] = {}
        self.shapes: set[tuple[int, int, int, int]] = set()

    def look(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, extras: Any) -> None:
        kind, layer = type(module).__name__, getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.windows:
            raise UnsupportedModel(f"{kind}: layer {layer} attends more than once, or does not say which one it is")
        asked = {name for name, value in extras.items() if value is not None and value is not False}
        if unknown := sorted(asked - _HARMLESS):
            raise UnsupportedModel(f"{kind} asks for {', '.join(unknown)}, which paged attention does not compute")
        if not isinstance(mask, _Mask):
            raise UnsupportedModel(f"{kind} makes its own attention mask instead of asking transformers for one")
        self.windows[layer] = _window(mask.sees, self._length, kind)
        self.shapes.add((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))


def probe_attention(model: Any, length: int) -> Attention:
    """`length`: the longest context, within which rows must see all before them or a window of them.

    Raises UnsupportedModel for anything else.
    """
    kind, probe, own = type(model).__name__, _Probe(length), model.config._attn_implementation
    token, position = torch.zeros(2, 1, 1, dtype=torch.long, device=model.device)
    model.config._attn_implementation = _PROBE
    try:
        model(input_ids=token, position_ids=position, use_cache=False, outrider_probe=probe)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the model's own code, which may be any of transformers' and fail in any way
        raise UnsupportedModel(f"{kind} does not run with another attention: {error}") from error
    finally:
        model.config._attn_implementation = own
    return _described(kind, probe, int(model.config.num_hidden_layers))


def _described(kind: str, probe: _Probe, layers: int) -> Attention:
    if sorted(probe.windows) != list(range(layers)):
        raise UnsupportedModel(
            f"{kind}: {len(probe.windows)} of {layers} layers attend through transformers' interface"
        )
    if len(probe.shapes) != 1:
        raise UnsupportedModel(f"{kind}: layers with unlike heads (query, KV, widths): {sorted(probe.shapes)}")
    ((query_heads, kv_heads, key_dim, value_dim),) = probe.shapes
    if key_dim != value_dim:
        raise UnsupportedModel(f"{kind}: keys of {key_dim} and values of {value_dim} numbers a head")
    return Attention(tuple(probe.windows[layer] for layer in range(layers)), query_heads, kv_heads, key_dim)


def _window(sees: MaskFunction, length: int, kind: str) -> int | None:
    """How many rows the last row sees, if the mask is a sliding window of that size; None if that is all of them."""
    zero, keys = torch.tensor(0), torch.arange(length)
    last = torch.as_tensor(sees(zero, zero, torch.tensor(length - 1), keys)).expand(length)
    window = int(last.sum())
    for row in {0, window - 1, window, length // 2, length - 2, length - 1}:
        if not 0 <= row < length:
            continue
        found = torch.as_tensor(sees(zero, zero, torch.tensor(row), keys)).expand(length)
        if not torch.equal(found, (keys <= row) & (keys > row - window)):
            raise UnsupportedModel(f"{kind}: rows see neither all before them nor a sliding window of them")
    return None if window == length else window


def _attend(
    module: nn.Module,
    query: Tensor,  # [1, H, 1, D]
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    outrider_probe: _Probe,
    **extras: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface; the numbers it returns are of no matter."""
    outrider_probe.look(module, query, key, value, attention_mask, extras)
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _mask(*, mask_function: MaskFunction, **_: Any) -> _Mask:
    return _Mask(mask_function)


AttentionInterface.register(_PROBE, _attend)
AttentionMaskInterface.register(_PROBE, _mask)
