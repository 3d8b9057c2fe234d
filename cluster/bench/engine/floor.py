"""What a pass cannot be faster than: the bytes that it must read over the bandwidth of memory.

Knows nothing of how passes run. The bandwidth is measured, by reading a buffer that fits no cache.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider_kernels.tensor_parallel import head_dim_of, local_heads

BUFFER_BYTES = 1 << 29  # beyond the largest caches of today's processors
_WIDTH = 2048
_TRIES = 3  # of each way in a round


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a pass reads of a dense model, whatever its code: each weight once, each cached row once."""

    weight_bytes: int
    kv_bytes_per_token: int

    def floor_ms(self, cached_tokens: int, bytes_per_s: float) -> float:
        return 1e3 * (self.weight_bytes + cached_tokens * self.kv_bytes_per_token) / bytes_per_s


def traffic_of(directory: Path, dtype: torch.dtype) -> Traffic:
    """Reads the configuration only. Of an embedding that is not also the head a pass reads a few rows: left out."""
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    weights = {id(parameter): parameter.numel() for parameter in model.parameters()}
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if embedding is not head:  # untied, or tied only once there are values
        del weights[id(embedding)]
    _, kv_heads = local_heads(config, 0, 1)
    kv_values = 2 * config.num_hidden_layers * kv_heads * head_dim_of(config)
    return Traffic(sum(weights.values()) * dtype.itemsize, kv_values * dtype.itemsize)


class Bandwidth:
    """Measured again in every round of a run; the best counts, because a floor that is too high flatters.

    Two ways of reading, since neither is the faster one everywhere: a sum, and a product with a vector.
    """

    def __init__(self, device: str, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._matrix = torch.ones(buffer_bytes // 4 // _WIDTH, _WIDTH, device=device)
        self._vector = torch.ones(_WIDTH, device=device)
        self.bytes_per_s = 0.0

    def measure(self) -> None:
        for _ in range(_TRIES):
            self._time(self._matrix.sum)
            self._time(lambda: self._matrix @ self._vector)

    def _time(self, read: Callable[[], object]) -> None:
        synchronise(self._matrix.device)
        started = time.perf_counter()
        read()
        synchronise(self._matrix.device)
        self.bytes_per_s = max(self.bytes_per_s, 4 * self._matrix.numel() / (time.perf_counter() - started))


def synchronise(device: torch.device) -> None:
    """Wait for what a GPU still does, so that a clock tells its time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
