"""A tokenizer.json as bundles hold it: the same tokenizer in the form that loads with least memory.

Newer files spell each merge as a list of two strings. The library holds all those lists before it
makes anything of them, and their memory stays with the process. Knows no text and no ids.
"""

from __future__ import annotations

import json
from typing import Any


def compact(content: bytes) -> bytes:
    """The same content without white space, and with merges in the older form where they fit it."""
    found = json.loads(content)
    merges = found["model"].get("merges")
    if merges and all(_fits_one_string(merge) for merge in merges):
        found["model"]["merges"] = [" ".join(merge) for merge in merges]
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _fits_one_string(merge: Any) -> bool:
    """Whether a merge is a pair that is found again when its string is read."""
    if not isinstance(merge, list):
        return False
    # The older form had a first line of this kind, which is skipped wherever it stands.
    return not merge[0].startswith("#version") and not any(" " in piece for piece in merge)
