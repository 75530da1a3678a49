"""The runner on a CPU: a ``core.ports.Runner`` that runs the model on one batch after another.

``execute`` copies swapped blocks, applies the other changes of the batch, builds the inputs and runs the model;
``sample`` samples the tokens. Each is done when it returns.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from quire_engine.core.batch import Batch, RunnerOutput, TokenMasks
from quire_engine.model.layers import MOST_RECORDED_TOKENS, DecoderStack, recorded_steps
from quire_engine.runner.cpu_runner import CpuParts, CpuRunner
from quire_engine.runner.draft_model import DraftModel
from quire_engine.runner.inputs import blank_inputs
from quire_engine.runner.logprobs import LogitsRows, logits_rows, report_prompts
from quire_engine.runner.sampler import NOTHING_DRAWN, Drawn, Sampler
from quire_engine.runner.verification import draws_of, verified


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A ``PendingOutput`` that is done."""

    output: RunnerOutput

    def wait(self) -> RunnerOutput:
        return self.output


class ModelRunner(CpuRunner):
    def __init__(
        self, parts: CpuParts, *, vocab_size: int, drafter: DraftModel | None = None, draft_layers: int = 0
    ) -> None:
        """Create the runner. The caches are those of the model's layers, then of the ``drafter``'s ``draft_layers``."""
        super().__init__(parts)
        self._model = parts.model
        self._caches = parts.caches[: len(parts.caches) - draft_layers]
        self._sampler = Sampler(max_rows=parts.max_rows, vocab_size=vocab_size)
        self._drafter = drafter

    @torch.inference_mode()
    def record(self, *, most_drafts: int) -> None:
        """Record the steps ahead that decode, with at most so many drafts of each sequence.

        Drafts let the sizes of steps vary, and their first trial would take the recordings for the cost of drafts. The
        largest size is first, so that all use its memory.
        """
        parts, model = self._parts, self._model
        if isinstance(model, DecoderStack):
            for tokens in range(min(MOST_RECORDED_TOKENS, parts.max_rows * (1 + most_drafts)), 0, -1):
                for _ in parts.threads.possible(tokens):
                    inputs = blank_inputs(parts.layout, tokens, deterministic=parts.deterministic)
                    model.record(inputs, self._caches)
        if self._drafter is not None:
            self._drafter.record(parts.layout, parts.threads)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> "ComputedLogits":
        arrived, recorded = time.perf_counter(), self._recorded()
        self._swapper.apply(batch)
        began = time.perf_counter()
        for row in batch.released_rows:
            self._sampler.release(row)
        if batch.admitted:
            self._sampler.admit(batch.admitted)
        self._apply(batch)
        drafting = time.perf_counter()
        if self._drafter is not None:
            batch = self._drafter.propose(batch, self._rows.tables[0], self._sampler)
        drafted = time.perf_counter()
        wanted = logits_rows(batch)
        inputs = self._inputs(batch, wanted.rows)
        prepared = time.perf_counter()
        logits = self._model(inputs, self._caches)  # [R, V]
        ran = time.perf_counter()
        return ComputedLogits(
            runner=self,
            batch=batch,
            wanted=wanted,
            logits=logits,
            prepare_seconds=prepared - drafted + drafting - began,
            draft_seconds=drafted - drafting,
            run_seconds=ran - prepared,
            swap_seconds=began - arrived,
            is_first=self._recorded() > recorded,
        )

    def _recorded(self) -> int:
        """Return the number of steps of the model and of the drafter that were recorded."""
        return recorded_steps(self._model) + (0 if self._drafter is None else self._drafter.recorded)

    def draw(self, batch: Batch, logits: torch.Tensor, masks: TokenMasks | None) -> tuple[Drawn, list[int] | None]:
        """Sample from ``logits`` [R, V] for each sequence that samples, and return its number of tokens.

        A sequence with drafts keeps the tokens up to the first that is not the draft. The numbers are None if no
        sequence has drafts: each has one token then.
        """
        draws = draws_of(batch)
        if not len(draws.rows):
            return NOTHING_DRAWN, None
        drawn = self._sampler.draw(logits, draws.rows, draws.positions, masks)
        if not batch.num_drafts:
            self._rows.last_token[draws.rows] = drawn.token_ids
            return drawn, None
        found = verified(batch, drawn.token_ids, np.asarray(batch.token_ids, dtype=np.int64))
        self._rows.last_token[draws.rows[found.last]] = drawn.token_ids[found.last]
        return drawn.at(found.kept), found.counts.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedLogits:
    """The ``ForwardPass`` of a CPU: the model has run."""

    runner: ModelRunner
    batch: Batch
    wanted: LogitsRows
    logits: torch.Tensor  # [R + P, V]
    prepare_seconds: float
    draft_seconds: float
    run_seconds: float
    swap_seconds: float
    is_first: bool

    @property
    def token_ids(self) -> list[int]:
        return self.batch.token_ids

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None = None) -> FinishedStep:
        """Sample, and report the logprobs of prompts."""
        began = time.perf_counter()
        batch, logits = self.batch, self.logits
        prompt_logprobs = report_prompts(batch, logits, self.wanted.reported)
        if batch.prompt_logprobs:
            logits = logits[torch.from_numpy(self.wanted.sampled)]
        drawn, counts = self.runner.draw(batch, logits, masks)
        return FinishedStep(
            RunnerOutput(
                token_ids=drawn.token_ids.tolist(),
                counts=counts,
                logprobs=drawn.logprobs,
                prompt_logprobs=prompt_logprobs,
                prepare_seconds=self.prepare_seconds,
                run_seconds=self.run_seconds,
                sample_seconds=time.perf_counter() - began,
                swap_seconds=self.swap_seconds,
                draft_seconds=self.draft_seconds,
                is_first=self.is_first,
            )
        )
