"""Batches for tests of runners: empty except for what a test sets."""

from typing import Any

from quire_engine.core.batch import Batch, BlockUpdates


def batch(**changes: Any) -> Batch:
    fields: dict[str, Any] = {
        "step": 1,
        "rows": [],
        "num_computed": [],
        "num_scheduled": [],
        "token_ids": [],
        "samples": [],
        "feedback_tokens": [],
        "admitted": [],
        "block_updates": (BlockUpdates(),),
        "released_rows": [],
    }
    return Batch(**{**fields, **changes})
