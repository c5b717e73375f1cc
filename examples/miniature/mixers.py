"""Dense forward passes of what mixes rows: full attention and the gated delta rule.

Works on transformers' own modules of Qwen3-VL and Qwen3.5 and does the same sums. Knows nothing of
whole models, images or padding (rows behind a sequence's end never reach the rows before it).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

CHUNK = 32  # rows of the delta rule that are solved together


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """RMSNorm in one call; Qwen3.5 stores how far a weight is from one."""
    centred = isinstance(module, Qwen3_5RMSNorm)
    weight = 1 + module.weight if centred else module.weight
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the leading dimensions that `cos` covers; the others stay."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = turned.shape[-1] // 2
    swapped = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    turned = turned * cos + swapped * sin
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def query_key_value(
    attention: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Rotated heads [B, heads, L, d] and Qwen3.5's output gate [B, L, heads * d]."""
    shape = (*hidden.shape[:2], -1, attention.head_dim)
    q, gate = attention.q_proj(hidden), None
    if q.shape[-1] == 2 * attention.o_proj.in_features:
        q, gate = q.view(*shape[:3], 2 * attention.head_dim).chunk(2, -1)
        gate = gate.flatten(2)
    q = norm(attention.q_norm, q.reshape(shape)).transpose(1, 2)
    k = norm(attention.k_norm, attention.k_proj(hidden).view(shape)).transpose(1, 2)
    v = attention.v_proj(hidden).view(shape).transpose(1, 2)
    groups = attention.num_key_value_groups
    k, v = rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return rotate(q, cos, sin), k, v, gate


def attention_output(attention: nn.Module, mixed: Tensor, gate: Tensor | None) -> Tensor:
    """Output projection of mixed values [B, heads, L, d]."""
    rows = mixed.transpose(1, 2).flatten(2)
    return attention.o_proj(rows if gate is None else rows * gate.sigmoid())


def full_attention(attention: nn.Module, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Causal attention, with or without an output gate."""
    q, k, v, gate = query_key_value(attention, hidden, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return attention_output(attention, mixed, gate)


def linear_attention(module: nn.Module, hidden: Tensor) -> Tensor:
    """Gated DeltaNet from an empty state."""
    rows = module.conv1d(module.in_proj_qkv(hidden).mT)[..., : hidden.shape[1]]
    widths = (module.key_dim, module.key_dim, module.value_dim)
    q, k, v = F.silu(rows).mT.split(widths, -1)
    q, k = (t.unflatten(-1, (-1, module.head_k_dim)) for t in (q, k))
    v = v.unflatten(-1, (-1, module.head_v_dim))
    q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    groups = module.num_v_heads // module.num_k_heads
    q, k = (x.repeat_interleave(groups, 2) for x in (q * module.head_k_dim**-0.5, k))
    fall = -module.A_log.exp() * F.softplus(module.in_proj_a(hidden) + module.dt_bias)
    heads = (t.transpose(1, 2) for t in (q, k, v, fall, module.in_proj_b(hidden).sigmoid()))
    mixed = gated_delta(*heads).transpose(1, 2)
    z = module.in_proj_z(hidden).view(mixed.shape)
    return module.out_proj((norm(module.norm, mixed) * F.silu(z)).flatten(2))


def gated_delta(q: Tensor, k: Tensor, v: Tensor, fall: Tensor, beta: Tensor) -> Tensor:
    """Reads [B, H, L, d] of a state that decays by exp(fall) and learns k -> v at rate beta."""
    length = q.shape[2]
    pad = -length % CHUNK
    q, k, v = (F.pad(t, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for t in (q, k, v))
    fall, beta = (F.pad(t, (0, pad)).unflatten(2, (-1, CHUNK)) for t in (fall, beta))
    total, beta = fall.cumsum(-1), beta[..., None]
    future = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()
    decay = total.exp()[..., None]
    # Each row's correction depends on the corrections before it: one triangular system a chunk.
    right = torch.cat((v * beta, k * (beta * decay)), -1)
    system = (k * beta) @ k.mT * between
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, seen = solved.split(v.shape[-1], -1)
    scores, q = q @ k.mT * between, q * decay
    k = k * (total[..., -1:] - total).exp()[..., None]
    state, reads = q.new_zeros(()), []
    for index in range(q.shape[2]):
        values = new[:, :, index]
        if index:
            values = values - seen[:, :, index] @ state
        read = scores[:, :, index] @ values
        reads.append(read + q[:, :, index] @ state if index else read)
        state = state * decay[:, :, index, -1:] + k[:, :, index].mT @ values
    return torch.cat(reads, 2)[:, :, :length]
