"""Makes a draft model of a target's own first layers: embedding, N layers, final norm and head, as a checkpoint.

Works on tensors by name, without building the model. The copy shares the target's tokenizer and vocabulary by
construction, so it needs no training to be usable, only to be good.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cluster.protocol.errors import InvalidRequest

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_PER_LAYER_KEYS = ("layer_types", "no_rope_layers")  # lists with one entry per layer in config.json
_CARRIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "*.jinja")


def save_truncated(target_dir: Path, layers: int, out_dir: Path) -> None:
    """Write the first `layers` layers of the checkpoint in target_dir to out_dir, which is created.

    Raises InvalidRequest when target_dir holds no safetensors checkpoint with layers named "...layers.N...", or has
    fewer layers.
    """
    config = _config(target_dir)
    have = int(config.get("num_hidden_layers", 0))
    if not 1 <= layers <= have:
        raise InvalidRequest(f"layers must be within 1..{have}, got {layers}", "layers")
    if out_dir.resolve() == target_dir.resolve():
        raise InvalidRequest(f"{out_dir} is the target's own directory", "out")
    tensors = dict(_kept(target_dir, layers))
    found = {int(match[1]) for name in tensors if (match := _LAYER.search(name))}
    if found != set(range(layers)):
        raise InvalidRequest(f"{target_dir} has tensors of layers {sorted(found)}, expected 0..{layers - 1}")
    out_dir.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "config.json").write_text(json.dumps(_shortened(config, layers), indent=2) + "\n")
    for pattern in _CARRIED:
        for file in target_dir.glob(pattern):
            shutil.copy(file, out_dir / file.name)


def _config(target_dir: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((target_dir / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read the configuration in {target_dir}: {error}") from error
    return config


def _shortened(config: dict[str, Any], layers: int) -> dict[str, Any]:
    config = config | {"num_hidden_layers": layers}
    for key in _PER_LAYER_KEYS:
        if isinstance(per_layer := config.get(key), list):
            config[key] = per_layer[:layers]
    return config


def _kept(target_dir: Path, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor but those of later layers, shard by shard."""
    for shard in sorted(target_dir.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                match = _LAYER.search(name)
                if match is None or int(match[1]) < layers:
                    yield name, file.get_tensor(name)
