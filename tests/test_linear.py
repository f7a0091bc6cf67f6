"""Layers split over ranks, without processes: what each rank would compute is added up, or laid side by side."""

import pytest
import torch

from nanoengine.decoder import RMSNorm
from nanoengine.group import Group
from nanoengine.linear import Linear, VocabParallelEmbedding


def filled(layer, path, tensors):
    """The layer with its parameters from `tensors`, as the loader would fill them."""
    for name, destination, full_shape, rank in layer.sources(path):
        assert tensors[name].shape == full_shape
        starts = [rank * size % full for size, full in zip(destination.shape, full_shape)]
        destination.copy_(tensors[name][tuple(slice(s, s + n) for s, n in zip(starts, destination.shape))])
    return layer


def random_tensors(*parts, in_features):
    torch.manual_seed(3)
    tensors = {f"x.{name}.weight": torch.randn(size, in_features) for name, size in parts}
    return tensors | {f"x.{name}.bias": torch.randn(size) for name, size in parts}


def test_sources_of_a_fused_layer_on_the_second_of_two_ranks():
    layer = Linear({"q_proj": 8, "k_proj": 4}, 6, has_bias=True, outputs=Group(1, 2))
    assert layer.weight.shape == (6, 6) and layer.bias.shape == (6,)
    sources = {source.name: source for source in layer.sources("model.layers.0.self_attn.qkv_proj")}
    assert {name: (tuple(source.destination.shape), *source[2:]) for name, source in sources.items()} == {
        "model.layers.0.self_attn.q_proj.weight": ((4, 6), (8, 6), 1),
        "model.layers.0.self_attn.q_proj.bias": ((4,), (8,), 1),
        "model.layers.0.self_attn.k_proj.weight": ((2, 6), (4, 6), 1),
        "model.layers.0.self_attn.k_proj.bias": ((2,), (4,), 1),
    }
    for name, source in sources.items():  # views: who fills them fills the layer
        source.destination.fill_({"q": 1, "k": 2}[name.split(".")[-2][0]] * (10 if name.endswith("bias") else 1))
    assert layer.weight[:, 0].tolist() == [1] * 4 + [2] * 2 and layer.bias.tolist() == [10] * 4 + [20] * 2


def test_a_row_parallel_layer_s_sources_are_columns():
    layer = Linear({"o_proj": 6}, 8, has_bias=True, inputs=Group(1, 2))
    assert layer.weight.shape == (6, 4)
    assert [(source.name, tuple(source.destination.shape), *source[2:]) for source in layer.sources("x.o_proj")] == [
        ("x.o_proj.weight", (6, 4), (6, 8), 1), ("x.o_proj.bias", (6,), (6,), 1)]  # fmt: skip


def test_a_path_without_a_dot():
    assert [source.name for source in Linear({"lm_head": 8}, 4).sources("lm_head")] == ["lm_head.weight"]


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_outputs_lie_side_by_side_part_by_part(size, num_tokens):
    tensors, x = random_tensors(("a", 8), ("b", 4), in_features=6), torch.randn(num_tokens, 6)
    outs = []
    for rank in range(size):
        layer = Linear({"a": 8, "b": 4}, 6, True, outputs=Group(rank, size))
        outs.append(filled(layer, "x.ab", tensors)(x).split([8 // size, 4 // size], dim=1))
    for out, name in zip(zip(*outs), "ab"):
        expected = x @ tensors[f"x.{name}.weight"].T + tensors[f"x.{name}.bias"]
        torch.testing.assert_close(torch.cat(out, dim=1), expected)


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_outputs_add_up_with_the_bias_once(size, num_tokens):
    tensors, x = random_tensors(("a", 6), in_features=8), torch.randn(num_tokens, 8)
    total = sum(
        filled(Linear({"a": 6}, 8, True, inputs=Group(rank, size)), "x.a", tensors)(x.chunk(size, dim=1)[rank])
        for rank in range(size)
    )
    torch.testing.assert_close(total, x @ tensors["x.a.weight"].T + tensors["x.a.bias"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_an_embedding_add_up_and_its_logits_lie_side_by_side(size):
    torch.manual_seed(4)
    weight, token_ids, hidden = torch.randn(12, 6), torch.tensor([0, 11, 5, 6, 3, 2]), torch.randn(3, 6)
    ranks = [VocabParallelEmbedding({"e": 12}, 6, outputs=Group(rank, size)) for rank in range(size)]
    for rank in ranks:
        filled(rank, "x.e", {"x.e.weight": weight})
    torch.testing.assert_close(sum(rank(token_ids) for rank in ranks), weight[token_ids])
    torch.testing.assert_close(torch.cat([rank.logits(hidden) for rank in ranks], dim=1), hidden @ weight.T)
    assert [rank.vocab_start for rank in ranks] == [12 // size * rank for rank in range(size)]


def test_the_norm_adds_the_ranks_parts_up(monkeypatch):
    """Only then is the residual added, and the sum normalised."""
    x, residual, norm = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 8.0]]), RMSNorm(2, 1e-6, Group(0, 2))
    norm.weight.copy_(torch.tensor([1.0, 0.5]))
    monkeypatch.setattr(norm.group, "all_reduce", lambda part: part + torch.tensor([[3.0, 0.0]]))
    normed, total = norm(x, residual)
    assert total.tolist() == [[6.0, 8.0]]
    torch.testing.assert_close(normed, torch.tensor([[6.0, 4.0]]) / 50**0.5)  # the mean of squares is 50
