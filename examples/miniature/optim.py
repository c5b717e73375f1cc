"""Muon for matrices, AdamW for the rest, one schedule for both.

Knows parameters by name and shape. Knows nothing of models or stages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MUON_RATE, ADAM_RATE = 0.02, 1.5e-3


class Muon:
    """Momentum with orthogonalised updates; equal shapes are stacked into one batched product."""

    def __init__(self, params: Iterable[nn.Parameter], decay: float = 0.01) -> None:
        self.decay = decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for param in params:
            self.groups.setdefault(tuple(param.shape), []).append(param)
        self.buffers = {
            shape: torch.zeros(len(group), shape[0], math.prod(shape[1:]))
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update; parameters without a gradient stay as they are."""
        for shape, group in self.groups.items():
            if all(param.grad is None for param in group):
                continue
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
            update = self._orthogonal(shape, torch.stack([grad.flatten(1) for grad in grads]))
            scale = max(1.0, shape[0] / math.prod(shape[1:])) ** 0.5
            # A convolution (the patch embedding) takes a fifth of the step.
            scale *= 0.2 if len(shape) > 2 else 1.0
            for index, param in enumerate(group):
                if param.grad is not None:
                    param.mul_(1 - rate * self.decay)
                    param.add_(update[index].view_as(param), alpha=-rate * scale)

    def _orthogonal(self, shape: tuple[int, ...], grad: Tensor) -> Tensor:
        buffer = self.buffers[shape]
        buffer.lerp_(grad, 0.05)
        x = grad.lerp(buffer, 0.95)
        tall = x.shape[1] > x.shape[2]
        x = x.mT if tall else x
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(4):
            square = x @ x.mT
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * (square @ square)) @ x
        return x.mT if tall else x


class Optimizer:
    """Both optimisers over the given named parameters."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        pairs = list(named)
        matrices = [param for name, param in pairs if _is_matrix(name, param)]
        chosen = {id(param) for param in matrices}
        self.rest = [param for _, param in pairs if id(param) not in chosen]
        self.all = [param for _, param in pairs]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(self.rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.01)

    def step(self, loss: Tensor, factor: float) -> None:
        """Back-propagate and update with `factor` times the base rates."""
        for param in self.all:
            param.grad = None
        loss.backward()
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        self.muon.step(MUON_RATE * factor)
        self.adam.step()

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"muon": self.muon.buffers, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.muon.buffers = state["muon"]
        self.adam.load_state_dict(state["adam"])


def _is_matrix(name: str, param: nn.Parameter) -> bool:
    if "patch_embed.proj.weight" in name:
        return True
    tables = ("embed", "lm_head", "codebook", "characters")
    square = param.ndim == 2 and param.numel() <= 128 * 512
    return square and not any(part in name for part in tables)


def schedule(step: int, steps: int, flat: float = 0.5) -> float:
    """Warm-up over 60 steps, flat, then linear to 2 %."""
    part = step / steps
    fall = 1.0 if part < flat else max(0.02, (1 - part) / (1 - flat))
    return min(1.0, (step + 1) / 60) * fall
