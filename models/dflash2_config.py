"""What DFlash2 adds to a drafter's configuration: its convolution and its candidate selector."""

from __future__ import annotations

from dataclasses import dataclass

from .fields import Fields


@dataclass(frozen=True)
class ConvConfig:
    """DFlash2's convolution: number of taps (the first is the row itself), channels a group."""

    kernel_size: int
    group_size: int


@dataclass(frozen=True)
class SelectorConfig:
    """DFlash2's candidate selector: rank of its tables, candidates per row."""

    rank: int
    top_k: int


def parse_conv(own: Fields, body: Fields) -> ConvConfig:
    """The convolution's sizes, all required."""
    conv = ConvConfig(own.integer("conv_kernel_size"), own.integer("conv_group_size"))
    if body.integer("hidden_size") % conv.group_size:
        expected = f"a divisor of hidden_size={body.integer('hidden_size')}"
        raise own.bad("conv_group_size", expected, conv.group_size)
    if conv.kernel_size > own.integer("block_size"):
        expected = f"at most block_size={own.integer('block_size')}"
        raise own.bad("conv_kernel_size", expected, conv.kernel_size)
    return conv


def parse_selector(own: Fields, vocab_size: int) -> SelectorConfig:
    """The selector's sizes, all required."""
    selector = SelectorConfig(own.integer("selector_rank"), own.integer("selector_top_k"))
    if selector.top_k > vocab_size:
        raise own.bad("selector_top_k", f"at most vocab_size={vocab_size}", selector.top_k)
    return selector
