"""Matrix products whose weights are split over ranks, and where in the checkpoint each weight comes from.

Megatron-LM's cut (Shoeybi et al. 2019): a column-parallel layer holds some of the outputs, a row-parallel one some of
the inputs. What the latter (and the embedding) returns is this rank's part of a sum over the ranks; the norm that
follows adds the parts up. Layers with the same input are fused; of qkv_proj rank 1 of 2 holds
    rows |  q: heads 8-15  |  k: 4-7  |  v: 4-7  |     each a part of its own tensor"""
from collections.abc import Iterator
from typing import NamedTuple
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from nanoengine import kernels
from nanoengine.group import Group

class Source(NamedTuple):
    """`destination` holds what the checkpoint's tensor `name`, of shape `full_shape`, has at `index`."""
    name: str
    destination: Tensor
    full_shape: tuple[int, ...]
    index: tuple[slice, ...]

class Linear(nn.Module):
    """x [n, in_features / inputs.size] -> x @ weight.T + bias [n, sum of parts / outputs.size].

    parts: out_features by the checkpoint's name; several are fused. Column-parallel if `outputs` is the group of all
    ranks; row-parallel if `inputs` is: then the answer is a part of the sum, and rank 0's has the bias in it."""
    def __init__(self, parts: dict[str, int], in_features: int, has_bias: bool = False,
                 outputs: Group = Group(), inputs: Group = Group()):
        super().__init__()
        self.parts, self.in_features, self.outputs, self.inputs = parts, in_features, outputs, inputs
        self.weight = torch.empty(sum(parts.values()) // outputs.size, in_features // inputs.size)
        self.bias = torch.empty(self.weight.shape[0]) if has_bias else None
    def forward(self, x: Tensor) -> Tensor:
        out = product(x, self.weight, self.inputs.part(len(x)))
        return out if self.bias is None or self.inputs.rank > 0 else out.add_(self.bias)
    def sources(self, path: str) -> Iterator[Source]:
        """path: the module's own, e.g. "model.layers.0.mlp.gate_up_proj". The parts lie beside it."""
        prefix, start = path[:path.rfind(".") + 1], 0
        for name, size in self.parts.items():
            share, end = self.outputs.share(size), start + size // self.outputs.size
            index = share, self.inputs.share(self.in_features)
            yield Source(f"{prefix}{name}.weight", self.weight[start:end], (size, self.in_features), index)
            if self.bias is not None:
                yield Source(f"{prefix}{name}.bias", self.bias[start:end], (size,), (share,))
            start = end

def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ weight.T, into `out` if given. On the CPU torch's own choice is MKL, which on AMD takes 1.6 (8 rows) to 2.1
    times (a prompt) as long as oneDNN, which torch.compile chooses."""
    if x.shape[0] == 1 and kernels.has_triton(x):
        return kernels.matvec(x, weight, out)
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return torch.mm(x, weight.T, out=out)

class VocabParallelEmbedding(Linear):
    """Token ids [n] -> this rank's part of [n, hidden_size]: each rank holds a range of the vocabulary and has zeros for
    the ids of the others. As the LM head, [n, hidden_size] -> logits [n, vocab_size / size]."""
    def __init__(self, name: str, vocab_size: int, hidden_size: int, group: Group):
        super().__init__({name: vocab_size}, hidden_size, outputs=group)
        self.vocab_start = group.share(vocab_size).start
    def forward(self, token_ids: Tensor) -> Tensor:
        if self.outputs.size == 1:
            return F.embedding(token_ids, self.weight)
        local_ids = token_ids - self.vocab_start
        is_here = (local_ids >= 0) & (local_ids < self.weight.shape[0])
        return torch.mul(F.embedding(local_ids * is_here, self.weight), is_here[:, None], out=self.outputs.part(len(is_here)))
    def logits(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden)
