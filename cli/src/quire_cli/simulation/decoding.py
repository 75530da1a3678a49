"""The decoding sequences of an engine. All sample one token per step, so no sequence is touched per step.

Under ``engine``. Each finishes at a known number of decode steps, and needs a block whenever its tokens pass a multiple
of the block size; all sequences with the same remainder need it in the same step.
"""

from heapq import heapify, heappop, heappush

from quire_cli.simulation.sequence import Sequence


class Decoding:
    """The sequences that decode."""

    def __init__(self, block_size: int) -> None:
        self.tokens = 0
        """The tokens in the KV cache of all of them."""
        self._step = 0
        self._block_size = block_size
        self._growing = [0] * block_size
        """Sequences by the remainder of their tokens at step 0."""
        self._finishes: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._finishes)

    @property
    def steps_left(self) -> int:
        """Until the first of them finishes."""
        return self._finishes[0][0] - self._step

    def growth(self, steps: int) -> int:
        """Blocks that they take in the next so many steps."""
        size, growing, now = self._block_size, self._growing, self._step
        if steps == 1:
            return growing[-now % size]
        cycles, rest = divmod(steps, size)
        return cycles * len(self._finishes) + sum(growing[-(now + i) % size] for i in range(rest))

    def most_steps(self, free_blocks: int) -> int:
        """Until the first of them finishes, or until so many blocks are taken; at least one is known to fit."""
        most = self.steps_left
        if self.growth(most) <= free_blocks:
            return most
        fewest = 1
        while most - fewest > 1:
            middle = (fewest + most) // 2
            if self.growth(middle) <= free_blocks:
                fewest = middle
            else:
                most = middle
        return fewest

    def join(self, sequence: Sequence) -> None:
        """Add a sequence that has sampled a token and needs more."""
        sequence.decoding_since = self._step
        last = self._step + sequence.output_tokens - sequence.generated
        heappush(self._finishes, (last, sequence.order, sequence))
        self._growing[(sequence.computed - self._step) % self._block_size] += 1
        self.tokens += sequence.computed

    def advance(self, steps: int) -> list[Sequence]:
        """Let all take so many steps; those that finish with the last of them."""
        self._step += steps
        self.tokens += steps * len(self._finishes)
        finished: list[Sequence] = []
        while self._finishes and self._finishes[0][0] <= self._step:
            sequence = heappop(self._finishes)[2]
            self._stop(sequence)
            finished.append(sequence)
        return finished

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that is preempted."""
        self._finishes = [entry for entry in self._finishes if entry[2] is not sequence]
        heapify(self._finishes)
        self._stop(sequence)

    def _stop(self, sequence: Sequence) -> None:
        assert sequence.decoding_since is not None
        self._growing[(sequence.computed - sequence.decoding_since) % self._block_size] -= 1
        taken = self._step - sequence.decoding_since
        sequence.computed += taken
        sequence.generated += taken
        sequence.known += taken
        sequence.decoding_since = None
        self.tokens -= sequence.computed
