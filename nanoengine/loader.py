"""safetensors files -> parameters. Every name must be accounted for: what the model needs is in the files, what is
in the files goes somewhere, and shapes agree; otherwise the error says which tensor of which file.

Tensors are read one at a time, and each rank reads only its slices: host memory stays near the size of one tensor.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from safetensors import safe_open

from nanoengine.linear import Source

INDEX = "model.safetensors.index.json"


def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file. With an index, exactly what it maps (a consolidated copy may lie beside the shards).

    Raises FileNotFoundError if there are no weights or the index names a file that isn't there.
    """
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        missing = sorted(file for file in set(weight_map.values()) if not (folder / file).is_file())
        if missing:
            raise FileNotFoundError(f"{folder / INDEX} names {', '.join(missing)}, which {folder} doesn't hold")
        return {name: folder / file for name, file in weight_map.items()}
    files = [folder / "model.safetensors"]
    files = files if files[0].is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights: no *.safetensors")
    names = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            names.update(dict.fromkeys(tensors.keys(), file))
    return names


def load_weights(folder: Path, sources: Iterable[Source]) -> None:
    """Fill every source's destination. Raises ValueError naming the tensors that are missing, unexpected (a tied
    copy of the embedding and old rotary buffers may be there) or of the wrong shape."""
    sources = {source.name: source for source in sources}
    files = checkpoint_files(folder)
    missing = sorted(sources.keys() - files.keys())
    unexpected = sorted(name for name in files.keys() - sources.keys()
                        if name != "lm_head.weight" and not name.endswith("rotary_emb.inv_freq"))
    for problem, names in (("is missing", missing), ("is not part of this model", unexpected)):
        if names:
            raise ValueError(f"{folder}: tensor {names[0]} {problem}" + f" ({len(names)} such)" * (len(names) > 1))
    by_file = defaultdict(list)
    for source in sources.values():
        by_file[files[source.name]].append(source)
    for file, group in by_file.items():
        with safe_open(file, "pt", device=str(group[0].destination.device)) as tensors:
            absent = {source.name for source in group} - set(tensors.keys())
            if absent:
                raise ValueError(f"{file}: tensor {min(absent)} is missing, though the index says it is there")
            for source in group:
                _copy(tensors.get_slice(source.name), source, file)


def _copy(tensor, source: Source, file: Path) -> None:
    if tuple(tensor.get_shape()) != source.full_shape:
        raise ValueError(f"{file}: tensor {source.name} has shape {list(tensor.get_shape())}, but config.json "
                         f"implies {list(source.full_shape)}")
    source.destination.copy_(tensor[source.index])
