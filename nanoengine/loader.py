"""safetensors files -> parameters. Names and shapes must agree; each rank reads its slices, one tensor at a time."""
from collections.abc import Iterable
from pathlib import Path
from safetensors import safe_open
from nanoengine.config import read_json, refuse_if
from nanoengine.linear import Source

def checkpoint_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> its file (or FileNotFoundError). An index decides alone: a consolidated copy may lie beside."""
    index, files = folder / "model.safetensors.index.json", {}
    weight_map = read_json(index)["weight_map"] if index.is_file() else {}
    for file in sorted(set(weight_map.values())) or ["model.safetensors"]:
        with safe_open(folder / file, "pt") as tensors:
            files |= {name: folder / file for name in tensors.keys() if not weight_map or weight_map.get(name) == file}
    return files

def load_weights(folder: Path, sources: Iterable[Source]) -> None:
    """Fill all destinations. ValueErrors name a tensor that is missing, unexpected (a tied head isn't) or misshapen."""
    sources, files = {source.name: source for source in sources}, checkpoint_files(folder)
    unexpected = {n for n in files if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")} - sources.keys()
    for problem, names in (("is missing", sources.keys() - files), ("is not part of this model", unexpected)):
        refuse_if(names, f"{folder}: tensor {min(names, default=None)} {problem} ({len(names)} such)")
    for name, (_, destination, wanted, rank) in sources.items():
        with safe_open(files[name], "pt", device=str(destination.device)) as tensors:
            shape = tuple((tensor := tensors.get_slice(name)).get_shape())
            refuse_if(shape != wanted, f"{files[name]}: tensor {name} has shape {shape}, config.json implies {wanted}")
            starts = [rank * size % full for size, full in zip(destination.shape, shape)]   # 0 where nothing is cut
            destination.copy_(tensor[tuple(slice(s, s + size) for s, size in zip(starts, destination.shape))])
