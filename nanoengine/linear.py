"""Matrix products whose weights are split over ranks, and where in the checkpoint each weight comes from.

Megatron-LM's cut (Shoeybi et al. 2019): a column-parallel layer holds some of the outputs, a row-parallel layer some
of the inputs, so a pair of them needs one all-reduce. Layers that read the same input are fused into one product.
With one rank nothing is split and no process group exists. Reading files is the loader's business.

    qkv on rank 1 of 2     rows |  q: heads 8-15  |  k: 4-7  |  v: 4-7  |     each from the middle of its own tensor
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from nanoengine import kernels


@dataclass(frozen=True)
class Group:
    """This rank's place among `size` ranks, and what they do together. With one rank every call is free."""

    rank: int = 0
    size: int = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, stacked in rank order: [size, *x.shape]."""
        if self.size == 1:
            return x[None]
        out = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(out), x.contiguous())
        return out

    def all_min(self, x: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return x

    def share(self, num_features: int) -> slice:
        """This rank's part of `num_features`."""
        part = num_features // self.size
        return slice(self.rank * part, (self.rank + 1) * part)


@dataclass(frozen=True)
class Source:
    """`destination` holds what the checkpoint's tensor `name`, of shape `full_shape`, has at `index`."""

    name: str
    destination: Tensor
    full_shape: tuple[int, ...]
    index: tuple[slice, ...]


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape), requires_grad=False)


class ColumnParallelLinear(nn.Module):
    """[n, in_features] -> [n, sum(parts) / size]: several products of one input, fused, each split by outputs.

    parts: out_features by the name that the checkpoint knows, e.g. {"q_proj": 2048, "k_proj": 1024, ...}.
    """

    def __init__(self, prefix: str, parts: dict[str, int], in_features: int, has_bias: bool, group: Group):
        super().__init__()
        self.prefix, self.parts, self.group = prefix, parts, group
        num_outputs = sum(parts.values()) // group.size
        self.weight = parameter(num_outputs, in_features)
        self.bias = parameter(num_outputs) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def sources(self) -> Iterator[Source]:
        offset = 0
        for name, out_features in self.parts.items():
            share = self.group.share(out_features)
            rows = slice(offset, offset + share.stop - share.start)
            yield Source(f"{self.prefix}{name}.weight", self.weight[rows],
                         (out_features, self.weight.shape[1]), (share, slice(None)))
            if self.bias is not None:
                yield Source(f"{self.prefix}{name}.bias", self.bias[rows], (out_features,), (share,))
            offset = rows.stop


class RowParallelLinear(nn.Module):
    """[n, in_features / size] -> [n, out_features]: each rank sums over its inputs, then the ranks' sums are added.

    The bias is added on rank 0 alone, so that it is added once.
    """

    def __init__(self, name: str, in_features: int, out_features: int, has_bias: bool, group: Group):
        super().__init__()
        self.name, self.in_features, self.group = name, in_features, group
        self.weight = parameter(out_features, in_features // group.size)
        self.bias = parameter(out_features) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(linear(x, self.weight, self.bias if self.group.rank == 0 else None))

    def sources(self) -> Iterator[Source]:
        out_features = self.weight.shape[0]
        yield Source(f"{self.name}.weight", self.weight.data, (out_features, self.in_features),
                     (slice(None), self.group.share(self.in_features)))
        if self.bias is not None:
            yield Source(f"{self.name}.bias", self.bias.data, (out_features,), (slice(None),))


class VocabParallelEmbedding(nn.Module):
    """Token ids [n] -> [n, hidden_size]; and, as the LM head, [n, hidden_size] -> logits [n, vocab_size / size].

    Each rank holds a range of the vocabulary, looks up the ids it holds, and adds zeros for the others.
    """

    def __init__(self, name: str, vocab_size: int, hidden_size: int, group: Group):
        super().__init__()
        self.name, self.vocab_size, self.group = name, vocab_size, group
        self.vocab_start = group.share(vocab_size).start
        self.weight = parameter(vocab_size // group.size, hidden_size)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(token_ids, self.weight)
        local_ids = token_ids - self.vocab_start
        is_here = (local_ids >= 0) & (local_ids < self.weight.shape[0])
        return self.group.all_reduce(F.embedding(local_ids * is_here, self.weight) * is_here[:, None])

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight)

    def sources(self) -> Iterator[Source]:
        yield Source(f"{self.name}.weight", self.weight.data, (self.vocab_size, self.weight.shape[1]),
                     (self.group.share(self.vocab_size), slice(None)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; a single row has a kernel of its own."""
    if x.shape[0] > 1 or not kernels.has_triton(x):
        return F.linear(x, weight, bias)
    out = kernels.matvec(x, weight)
    return out if bias is None else out + bias
