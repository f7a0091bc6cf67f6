"""Where weights come from if a folder holds more than one copy of a tensor."""

import json

import tiny
import torch
from safetensors.torch import load_file, save_file


def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(checkpoint, tmp_path):
    """Each shard also holds wrong copies of all that the index finds in the other."""
    source = checkpoint("llama", num_shards=2)
    folder = tiny.copy_checkpoint(source, tmp_path / "a")
    weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    shards = {file: load_file(source / file) for file in set(weight_map.values())}
    assert len(shards) == 2
    for file, own in shards.items():
        wrong = {name: torch.zeros_like(shards[other][name]) for name, other in weight_map.items() if other != file}
        save_file({**own, **wrong}, folder / file, metadata={"format": "pt"})
    prompt = tiny.random_ids(3, 9)
    torch.testing.assert_close(tiny.engine_logits(folder, prompt), tiny.engine_logits(source, prompt))
