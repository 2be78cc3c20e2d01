"""A checkpoint of the Hugging Face hub, or of a folder, as one state dict."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["state_dict_from_pretrained"]

# The file of weights, or the index of its shards; safetensors first: they run no code.
_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def _find(model_name: str, file: str) -> Path | None:
    if Path(model_name).is_dir():
        path = Path(model_name) / file
        return path if path.exists() else None
    from transformers.utils import cached_file

    found = cached_file(model_name, file, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def _load(path: Path, device) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path, device="cpu" if device is None else str(device))
    return torch.load(path, map_location=device or "cpu", weights_only=True)


def state_dict_from_pretrained(
    model_name: str, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """All weights of a checkpoint by name, whatever number of files they lie in.

    Args:
        model_name: of the hub, through ``transformers``' cache, or a folder.
        device: where to; default the CPU.
        dtype: of the floating ones; default theirs.

    Raises:
        OSError: no weights there, or not all of the files that their index names.
    """
    found = ((file, _find(model_name, file)) for file in _FILES)
    file, path = next(((file, path) for file, path in found if path is not None), (None, None))
    if path is None:
        raise OSError(f"{model_name} has none of {', '.join(_FILES)}")
    paths = [path]
    if file.endswith(".index.json"):
        shards = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        paths = [_find(model_name, shard) for shard in shards]
        missing = [shard for shard, found in zip(shards, paths) if found is None]
        if missing:
            raise OSError(f"{model_name} has no {', '.join(missing)}, which its {file} names")
    weights = {}
    for part in paths:
        weights.update(_load(part, device))
    if dtype is None:
        return weights
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in weights.items()}
