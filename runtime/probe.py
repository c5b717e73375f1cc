"""Whether a block of rows gives the same bits as the same rows one by one, tried at load.

Greedy text is then the plain run's bit for bit, whatever is drafted. Where it does not hold, text
can differ where two tokens are nearly as likely. Knows no prompt; uses a cache of its own.
"""

from __future__ import annotations

import numpy as np

from ..models.positions import Position, advancing_positions
from .target import Float, Target

PAST_ROWS, BLOCK_ROWS = 5, 4


def block_difference(target: Target) -> float:
    """The largest difference of hidden rows and logits between a block and single rows."""
    vocab_size = target.config.text.vocab_size
    ids = np.linspace(0, vocab_size - 1, PAST_ROWS + BLOCK_ROWS).astype(np.int64)
    pairs = zip(_outputs(target, ids, BLOCK_ROWS), _outputs(target, ids, 1), strict=True)
    return max(_difference(a, b) for a, b in pairs)


def _outputs(target: Target, ids: np.ndarray, step: int) -> list[Float]:
    """Hidden row and logits of each of the last rows in turn, `step` of them in every call."""
    cache = target.new_cache(ids.size)
    embeds = target.embed(ids)
    positions = advancing_positions(Position(0), ids.size)
    outputs: list[Float] = []
    starts = [0, *range(PAST_ROWS, ids.size, step)]
    for first, stop in zip(starts, [*starts[1:], ids.size], strict=True):
        rows = target.forward(
            cache, embeds[first:stop], positions[:, first:stop], None, (), certain=True
        )
        cache.commit(stop - first)
        if first:
            head = target.head.rows(rows.hidden, np.arange(stop - first), True)
            assert head.logits is not None
            for pair in zip(rows.hidden.copy(), head.logits, strict=True):
                outputs += pair
    return outputs


def _difference(a: Float, b: Float) -> float:
    # Rows of logits are long, and equal as a rule: nothing is computed from them then.
    return 0.0 if np.array_equal(a, b) else float(np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max())
