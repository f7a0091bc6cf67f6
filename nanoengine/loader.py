"""safetensors files -> parameters. Names and shapes must agree; each rank reads its slices, one tensor at a time."""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from nanoengine.linear import Source

def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file (or FileNotFoundError). An index decides alone: a consolidated copy may lie beside."""
    index, files = folder / "model.safetensors.index.json", {}
    weight_map = json.loads(index.read_text())["weight_map"] if index.is_file() else None
    for file in sorted(set(weight_map.values())) if weight_map else ["model.safetensors"]:
        with safe_open(folder / file, "pt") as tensors:
            files |= {n: folder / file for n in tensors.keys() if weight_map is None or weight_map.get(n) == file}
    return files

def load_weights(folder: Path, sources: Iterable[Source]) -> None:
    """Fill every source's destination. Raises ValueError naming a tensor that is missing, of the wrong shape, or
    unexpected (a tied copy of the embedding and old rotary buffers are not)."""
    sources, files = {source.name: source for source in sources}, checkpoint_files(folder)
    unexpected = {n for n in files if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")} - sources.keys()
    for problem, names in (("is missing", sources.keys() - files), ("is not part of this model", unexpected)):
        if names:
            raise ValueError(f"{folder}: tensor {min(names)} {problem} ({len(names)} such)")
    for name, (_, destination, full_shape, part) in sources.items():
        with safe_open(files[name], "pt", device=str(destination.device)) as tensors:
            tensor = tensors.get_slice(name)
            shape, wanted = tensor.get_shape(), list(full_shape)
            if shape != wanted:
                raise ValueError(f"{files[name]}: tensor {name} has shape {shape}, but config.json implies {wanted}")
            destination.copy_(tensor[part])
