"""How a layer computes when each rank holds a part of it.

Every function here takes the module, whose parameters are DTensors on the tensor-parallel mesh, its group, and the arguments of its
``forward``. Between a layer whose output is cut and the next whose input is, the model's own code runs on slices.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain import compat
from lightning_partrain.parallel.tensor.collectives import enter, gather_slices, own_slice, sum_parts


def part(param: Tensor | None) -> Any:
    """This rank's part of a parameter, differentiable."""
    return param.to_local() if isinstance(param, DTensor) else param


def is_conv1d(module: nn.Module) -> bool:
    """A linear layer of Hugging Face's whose weight is (inputs, outputs); by its name, so that transformers need not be there."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and getattr(module, "weight", None) is not None


def is_linear(module: nn.Module) -> bool:
    """A linear layer whose forward is the one known here."""
    kinds = (nn.Linear, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return type(module) in kinds and "weight" in module._parameters  # else computed before each call, as by weight_norm


def in_features(module: Any) -> int:
    """Of a linear layer or a Conv1D, before or after it was cut."""
    return int(module.weight.shape[0 if is_conv1d(module) else 1])


def out_features(module: Any) -> int:
    return int(module.weight.shape[1 if is_conv1d(module) else 0])


def _product(module: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = part(module.weight)
    return F.linear(x, weight.t() if is_conv1d(module) else weight, bias)


def column(module: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Replicated to cut: each rank has some of the outputs."""
    return _product(module, enter(x, group), part(module.bias))


def column_gathered(module: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Replicated to replicated: each rank has some of the outputs, and then all."""
    return gather_slices(column(module, group, x), group)


def row(module: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Cut to replicated: each rank has some of the inputs; the bias is added once, to the sum."""
    y = sum_parts(_product(module, x, None), group)
    return y if module.bias is None else y + module.bias


def row_of_whole(module: Any, group: dist.ProcessGroup, x: Tensor) -> Tensor:
    """Replicated to replicated, through layers that take some of the inputs each."""
    return row(module, group, own_slice(x, group))


def vocabulary(module: Any, group: dist.ProcessGroup, tokens: Tensor) -> Tensor:
    """An embedding of which each rank has some rows: the others give zeros, and the sum is replicated."""
    weight = part(module.weight)
    rows = weight.shape[0]
    compat.check_indices(tokens, module.num_embeddings)
    local = tokens - group.rank() * rows
    elsewhere = (local < 0) | (local >= rows)
    padding = module.padding_idx
    if padding is not None:
        padding -= group.rank() * rows
        padding = padding if 0 <= padding < rows else None
    found = F.embedding(local.masked_fill(elsewhere, 0), weight, padding)
    return sum_parts(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), group)


def summed_gradients(module: Any, group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
    """A replicated layer between cut ones: every rank has its part of the gradient of its parameters."""
    params = {key: enter(param, group) for key, param in module._parameters.items() if param is not None}
    module.__dict__.update(params)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        for key in params:
            del module.__dict__[key]


def attention(
    module: Any,
    group: dist.ProcessGroup,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """``nn.MultiheadAttention.forward``, of which each rank has some heads."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    batched = query.ndim == 3

    def batch_first(x: Tensor) -> Tensor:
        return (x if module.batch_first else x.transpose(0, 1)) if batched else x.unsqueeze(0)

    same = query is key and key is value
    query = enter(query, group)
    key, value = (query, query) if same else (enter(key, group), enter(value, group))
    if module.in_proj_weight is not None:
        weights = part(module.in_proj_weight).chunk(3)
    else:
        weights = [part(module.q_proj_weight), part(module.k_proj_weight), part(module.v_proj_weight)]
    biases = part(module.in_proj_bias).chunk(3) if module.in_proj_bias is not None else (None, None, None)
    q, k, v = (  # (batch, heads here, time, head_dim)
        F.linear(batch_first(x), weight, bias).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    heads = q.shape[1]
    attn_mask, key_padding_mask = (
        enter(m, group) if isinstance(m, Tensor) and m.requires_grad else m for m in (attn_mask, key_padding_mask)
    )
    mask = _mask(attn_mask, key_padding_mask, q, slice(group.rank() * heads, (group.rank() + 1) * heads))
    dropout = module.dropout if module.training else 0.0
    shown = None
    if need_weights:
        scores = (q * module.head_dim**-0.5) @ k.transpose(-1, -2)
        shown = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
        y = shown @ v
        if average_attn_weights:
            shown = sum_parts(shown.sum(1) / module.num_heads, group)
        else:
            shown = gather_slices(shown.movedim(1, -1), group).movedim(-1, 1)
        shown = shown if batched else shown.squeeze(0)
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
    y = row(module.out_proj, group, y.transpose(1, 2).flatten(2))
    if not batched:
        return y.squeeze(0), shown
    return (y if module.batch_first else y.transpose(0, 1)), shown


def _mask(attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, heads: slice) -> Tensor | None:
    """Both masks as one that is added to the scores of these heads; in torch's masks True hides."""

    def added(mask: Tensor) -> Tensor:
        if mask.dtype == torch.bool:
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask, float("-inf"))
        return mask.to(q.dtype)

    whole = None
    if attn_mask is not None:
        whole = added(attn_mask)
        if whole.ndim == 3:
            whole = whole.unflatten(0, (q.shape[0], -1))[:, heads]
    if padding is not None:
        keys = added(padding)
        keys = (keys if keys.ndim == 2 else keys.unsqueeze(0))[:, None, None]
        whole = keys if whole is None else whole + keys
    return whole
