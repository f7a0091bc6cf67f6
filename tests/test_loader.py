"""Where weights come from if a folder holds more than one copy of a tensor."""

import json

import pytest
import tiny
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nanoengine import loader
from nanoengine.config import ModelConfig
from nanoengine.decoder import Decoder
from nanoengine.group import Group


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


class Spy:
    """safe_open, but that it notes the bytes of every tensor that is made from the file."""

    def __init__(self, log, *args, **options):
        self.log, self.file = log, safe_open(*args, **options)

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *args):
        return self.file.__exit__(*args)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        self.slice = self.file.get_slice(name)
        return self

    def get_shape(self):
        return self.slice.get_shape()

    def __getitem__(self, index):
        tensor = self.slice[index]
        self.log.append(tensor.nbytes)
        return tensor


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_rank_reads_its_share_and_one_tensor_at_a_time(checkpoint, monkeypatch, family):
    folder, reads = checkpoint(family), {1: [], 2: []}
    for size, log in reads.items():
        monkeypatch.setattr(loader, "safe_open", lambda *args, **options: Spy(log, *args, **options))
        model = Decoder(ModelConfig.from_folder(folder), 128, Group(size - 1, size))
        sources = list(model.sources())
        loader.load_weights(folder, sources)
        assert log == [source.destination.nbytes for source in sources]
    assert len(reads[1]) == len(reads[2]) and sum(reads[2]) < 0.52 * sum(reads[1])      # norms aren't split
