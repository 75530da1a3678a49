"""What a request does to its own logits before the draw: biases, forbidden tokens, penalties.

One ``LogitShaper`` per row that asks for any; rows that do not cost nothing. Work is over the tokens that occurred, not
over the vocabulary.

Legend: V vocabulary.
"""

import numpy as np

from quire_engine.core.batch import Admission


def make_shaper(admission: Admission, vocab_size: int) -> "LogitShaper | None":
    """None when the request leaves its logits as they are."""
    params = admission.params
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
    if penalised or params.logit_bias or params.min_tokens > len(admission.output_token_ids):
        return LogitShaper(admission, vocab_size)
    return None


class LogitShaper:
    """Follows one sequence: which tokens occurred, and how often among the outputs."""

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        params = admission.params
        self._params = params
        biases = {token: bias for token, bias in params.logit_bias if token < vocab_size}
        self._bias_ids = np.array(list(biases), dtype=np.int64)
        self._biases = np.array(list(biases.values()), dtype=np.float32)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else admission.eos_token_ids)}
        self._stop_ids = np.array(sorted(token for token in stops if token < vocab_size), dtype=np.int64)
        self._places: dict[int, int] = {}  # token to its place in the two columns below
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)  # among the outputs
        self._num_outputs = 0
        for token in admission.prompt_token_ids:
            self._place(token)
        for token in admission.output_token_ids:
            self.observe(token)

    def observe(self, token: int) -> None:
        """A token was drawn for this sequence."""
        self._num_outputs += 1
        place = self._place(token)  # first, for it may replace the columns by longer ones
        self._counts[place] += 1.0

    def apply(self, logits: np.ndarray) -> None:
        """Changes one row [V] of float32 logits in place: biases, then the least length, then penalties."""
        if len(self._bias_ids):
            logits[self._bias_ids] += self._biases
        if self._num_outputs < self._params.min_tokens:
            logits[self._stop_ids] = -np.inf
        self._penalise(logits)

    def _penalise(self, logits: np.ndarray) -> None:
        used = len(self._places)
        ids, counts = self._ids[:used], self._counts[:used]
        values = logits[ids]
        repetition = self._params.repetition_penalty
        if repetition != 1.0:
            values = np.where(values > 0.0, values / np.float32(repetition), values * np.float32(repetition))
        values = values - np.float32(self._params.frequency_penalty) * counts
        logits[ids] = values - np.float32(self._params.presence_penalty) * (counts > 0.0)

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[place] = token
        return place
