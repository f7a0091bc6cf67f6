"""Matrix products whose weights are split over ranks (Megatron-LM, Shoeybi et al. 2019), and where in the checkpoint
each comes from. A column-parallel layer holds some outputs, a row-parallel one some inputs: like the embedding it
returns this rank's part of a sum for the next norm to add up. Fused if inputs are equal; of qkv_proj rank 1 of 2 holds
    rows |  q: heads 8-15  |  k: 4-7  |  v: 4-7  |     each a part of its own tensor"""
from collections import namedtuple
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from nanoengine import kernels
from nanoengine.group import Group

# `destination` is rank `rank`'s part of the checkpoint's tensor `name`: cut where it is smaller than `full_shape`.
Source = namedtuple("Source", "name destination full_shape rank")

class Linear(nn.Module):
    """x [n, in_features / inputs.size] -> x @ weight.T + bias [n, sum of parts / outputs.size].
    parts: out_features by the checkpoint's name; several are fused. Column-parallel if `outputs` is the group of all
    ranks; row-parallel if `inputs` is: then the answer is a part of the sum, and rank 0's has the bias in it."""
    def __init__(self, parts: dict[str, int], in_features: int, has_bias: bool = False,
                 outputs: Group = Group(), inputs: Group = Group()):
        super().__init__()
        self.parts, self.in_features, self.outputs, self.inputs = parts, in_features, outputs, inputs
        self.weight = torch.empty(sum(parts.values()) // outputs.size, in_features // inputs.size)
        self.bias = torch.empty(len(self.weight)) if has_bias else None
    def forward(self, x: Tensor) -> Tensor:
        out = product(x, self.weight, self.inputs.part(len(x)))
        return out if self.bias is None or self.inputs.rank > 0 else out.add_(self.bias)
    def sources(self, path: str):
        """Of each tensor. path: the module's, e.g. "model.layers.0.mlp.gate_up_proj"; its parts lie beside it."""
        prefix, sizes = path[:path.rfind(".") + 1], [size // self.outputs.size for size in self.parts.values()]
        for kind, tensor in (("weight", self.weight), ("bias", self.bias)):
            for (name, size), part in zip(self.parts.items(), () if tensor is None else tensor.split(sizes)):
                full_shape = (size, self.in_features)[:tensor.dim()]
                yield Source(f"{prefix}{name}.{kind}", part, full_shape, max(self.outputs.rank, self.inputs.rank))

def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ weight.T, into `out` if given. On a CPU by oneDNN: torch's own choice, MKL, takes up to 2.1 times as long."""
    if len(x) == 1 and kernels.has_triton(x):
        return kernels.matvec(x, weight, out)
    if x.device.type == "cpu" and x.dtype == torch.float32 and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return torch.mm(x, weight.T, out=out)

class VocabParallelEmbedding(Linear):
    """Token ids [n] -> this rank's part of [n, hidden_size]: each rank holds a range of the vocabulary, and has zeros
    for the ids of the others. As the LM head, `logits`: [n, hidden_size] -> [n, vocab_size / size]."""
    vocab_start = property(lambda self: self.outputs.rank * len(self.weight))
    logits = Linear.forward
    def forward(self, token_ids: Tensor) -> Tensor:
        if self.outputs.size == 1:
            return F.embedding(token_ids, self.weight)
        ids, out = token_ids - self.vocab_start, self.outputs.part(len(token_ids))
        is_here = (ids >= 0) & (ids < len(self.weight))
        return torch.mul(F.embedding(ids * is_here, self.weight), is_here[:, None], out=out)
