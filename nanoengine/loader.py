"""safetensors files -> parameters. What the model needs is in the files, what is in the files goes somewhere,
and shapes agree; otherwise the error names the tensor. Each rank reads its slices, one tensor at a time.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from nanoengine.linear import Source

def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file. An index decides alone: a consolidated copy may lie beside the shards.
    Raises FileNotFoundError for model.safetensors, or a file that the index names, if it isn't there."""
    index, files = folder / "model.safetensors.index.json", {}
    weight_map = json.loads(index.read_text())["weight_map"] if index.is_file() else None
    for file in sorted(set(weight_map.values())) if weight_map else ["model.safetensors"]:
        with safe_open(folder / file, "pt") as tensors:
            files.update((name, folder / file) for name in tensors.keys()
                         if weight_map is None or weight_map.get(name) == file)
    return files

def load_weights(folder: Path, sources: Iterable[Source]) -> None:
    """Fill every source's destination. Raises ValueError naming a tensor that is missing, unexpected (a tied
    copy of the embedding and old rotary buffers may be there) or of the wrong shape."""
    sources, files = {source.name: source for source in sources}, checkpoint_files(folder)
    unexpected = {n for n in files if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")}
    for problem, names in (("is missing", sources.keys() - files.keys()),
                           ("is not part of this model", unexpected - sources.keys())):
        if names:
            raise ValueError(f"{folder}: tensor {min(names)} {problem} ({len(names)} such)")
    for name, source in sources.items():
        with safe_open(files[name], "pt", device=str(source.destination.device)) as tensors:
            tensor = tensors.get_slice(name)
            if tuple(tensor.get_shape()) != source.full_shape:
                raise ValueError(f"{files[name]}: tensor {name} has shape {tensor.get_shape()}, but "
                                 f"config.json implies {list(source.full_shape)}")
            source.destination.copy_(tensor[source.index])
