"""Reports of probabilities that are computed on the device in a step, and read by the host after the step.

Legend: Q reported lines of logits, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire_engine.core.batch import Batch, TokenLogprobs
from quire_engine.runner.device.accelerator import Accelerator
from quire_engine.runner.device.staging import HostToDeviceBatch, Item
from quire_engine.runner.logprobs import asked_of_prompts, by_prompt, entries, most_of
from quire_kernels.logprobs import Logprobs, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedReport:
    places: Item  # [Q] int64
    counts: np.ndarray  # [Q] int64, the number of most probable tokens to report

    def launch(self, logits: Tensor, lines: Tensor, token_ids: Tensor) -> "PendingReport":
        """Launch the report of token ``token_ids[i]`` in line ``lines[i]`` of logits; both [Q] int64."""
        found = token_logprobs(logits, lines, token_ids, most_of(self.counts, logits))
        return PendingReport(found=found, token_ids=token_ids, counts=self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReport:
    found: Logprobs
    token_ids: Tensor  # [Q] int64
    counts: np.ndarray

    def download(self, accelerator: Accelerator) -> "PendingReport":
        """Return a copy in host memory, which is complete when a later mark is reached."""
        found, fetch = self.found, accelerator.download
        return PendingReport(
            found=Logprobs(
                of_token=fetch(found.of_token),
                rank=fetch(found.rank),
                token_ids=fetch(found.token_ids),
                logprobs=fetch(found.logprobs),
            ),
            token_ids=fetch(self.token_ids),
            counts=self.counts,
        )

    def read(self) -> list[TokenLogprobs]:
        return entries(self.found, self.token_ids.tolist(), self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """The report that a batch requests for its prompts."""

    asked: AskedReport
    token_ids: Item  # [Q] int64, the prompts' next tokens

    def launch(self, logits: Tensor) -> PendingReport:
        return self.asked.launch(logits, self.asked.places.on_device, self.token_ids.on_device)


def stage_prompt_report(batch: Batch, lines: np.ndarray, transfer: HostToDeviceBatch) -> PromptReport | None:
    """Return the report for lines [Q] of the step's logits, in the order of ``Batch.prompt_logprobs``, or None."""
    if not batch.prompt_logprobs:
        return None
    asked = asked_of_prompts(batch.prompt_logprobs)
    return PromptReport(
        asked=AskedReport(places=transfer.add(lines), counts=asked.counts), token_ids=transfer.add(asked.token_ids)
    )


def read_prompts(batch: Batch, report: PendingReport | None) -> list[list[TokenLogprobs]]:
    """Return the entries for each of ``Batch.prompt_logprobs``."""
    return [] if report is None else by_prompt(batch.prompt_logprobs, report.read())


def spread(report: PendingReport | None, places: np.ndarray, count: int) -> list[TokenLogprobs | None] | None:
    """Return one entry per sampled token, at ``places`` [Q]; None if nothing is reported."""
    if report is None:
        return None
    spread_out: list[TokenLogprobs | None] = [None] * count
    for place, entry in zip(places.tolist(), report.read(), strict=True):
        spread_out[place] = entry
    return spread_out
