"""Logit shaping in plain torch: the reference for every implementation."""

import torch
from torch import Tensor

from quire_kernels.logit_shaping import TAIL, LogitEdits


def shape_logits(logits: Tensor, lines: Tensor, rows: Tensor, edits: LogitEdits) -> None:
    for line, row in zip(lines.tolist(), rows.tolist(), strict=True):
        logits[line] = shaped(logits[line], row, edits)


def shaped(logits: Tensor, row: int, edits: LogitEdits) -> Tensor:
    """Return one row [V] after its edits."""
    logits = logits.clone()
    allowed, words, stops, biases, counted, end, _ = edits.bounds[row].tolist()
    ids, values = edits.ids.long(), edits.values
    if words > allowed:
        kept = torch.zeros_like(logits, dtype=torch.bool)
        kept[ids[allowed:words]] = True
        logits[~kept] = -torch.inf
    drawn = last_drawn(row, edits)
    for word in _words(ids[words:stops].tolist()):
        before = len(word) - 1
        if before <= len(drawn) and drawn[len(drawn) - before :] == word[:-1]:
            logits[word[-1]] = -torch.inf
    if edits.num_drawn[row] < edits.min_tokens[row]:
        logits[ids[stops:biases]] = -torch.inf
    logits[ids[biases:counted]] += values[biases:counted]
    occurred, counts = ids[counted:end], values[counted:end]
    repetition, frequency, presence = edits.penalties[row]
    seen = logits[occurred]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits[occurred] = seen - frequency * counts - presence * (counts > 0)
    return logits


def last_drawn(row: int, edits: LogitEdits) -> list[int]:
    """Return the tokens sampled for a row, up to the last ``TAIL``."""
    count = int(edits.num_drawn[row])
    return [int(edits.tails[row, n % TAIL]) for n in range(max(0, count - TAIL), count)]


def _words(encoded: list[int]) -> list[list[int]]:
    words = []
    while encoded:
        count = encoded[0]
        words.append(encoded[1 : count + 1])
        encoded = encoded[count + 1 :]
    return words


def count_tokens(token_ids: Tensor, rows: Tensor, edits: LogitEdits) -> bool:
    for token, row in zip(token_ids.tolist(), rows.tolist(), strict=True):
        counted, end, room = edits.bounds[row, 4:].tolist()
        if room > counted:
            places = (edits.ids[counted:end] == token).nonzero()
            if len(places):
                edits.values[counted + int(places[0])] += 1
            elif end < room:
                edits.ids[end], edits.values[end] = token, 1
                edits.bounds[row, 5] += 1
            else:
                return False
        edits.tails[row, int(edits.num_drawn[row]) % TAIL] = token
        edits.num_drawn[row] += 1
    return True
