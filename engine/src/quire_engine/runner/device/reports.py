"""Reports of probabilities that are found on the device in a step, and read by the host when the step is done.

Legend: Q reported lines of logits, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from quire_engine.core.batch import Batch, TokenLogprobs
from quire_engine.runner.device.accelerator import Accelerator
from quire_engine.runner.device.staging import Item, Parcel
from quire_engine.runner.logprobs import asked_of_prompts, by_prompt, entries, most_of
from quire_kernels.logprobs import Logprobs, token_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedReport:
    places: Item  # [Q] int64
    counts: np.ndarray  # [Q] int64, how many likeliest tokens to report beside each

    def launch(self, logits: Tensor, lines: Tensor, token_ids: Tensor) -> "PendingReport":
        """Of line ``lines[i]`` of logits the token ``token_ids[i]``; both [Q] int64."""
        found = token_logprobs(logits, lines, token_ids, most_of(self.counts, logits))
        return PendingReport(found=found, token_ids=token_ids, counts=self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReport:
    found: Logprobs
    token_ids: Tensor  # [Q] int64
    counts: np.ndarray

    def download(self, accelerator: Accelerator) -> "PendingReport":
        """In host memory once a mark set afterwards was reached."""
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
    """What a batch asks of its prompts."""

    asked: AskedReport
    token_ids: Item  # [Q] int64, the prompts' next tokens

    def launch(self, logits: Tensor) -> PendingReport:
        return self.asked.launch(logits, self.asked.places.on_device, self.token_ids.on_device)


def stage_prompt_report(batch: Batch, lines: np.ndarray, parcel: Parcel) -> PromptReport | None:
    """``lines`` [Q] of the step's logits, in the order of ``Batch.prompt_logprobs``."""
    if not batch.prompt_logprobs:
        return None
    asked = asked_of_prompts(batch.prompt_logprobs)
    return PromptReport(
        asked=AskedReport(places=parcel.add(lines), counts=asked.counts), token_ids=parcel.add(asked.token_ids)
    )


def read_prompts(batch: Batch, report: PendingReport | None) -> list[list[TokenLogprobs]]:
    """For each of ``Batch.prompt_logprobs`` its entries."""
    return [] if report is None else by_prompt(batch.prompt_logprobs, report.read())


def spread(report: PendingReport | None, places: np.ndarray, count: int) -> list[TokenLogprobs | None] | None:
    """One entry per drawn token, ``places`` [Q] saying whose the reported ones are; None where nothing is."""
    if report is None:
        return None
    spread_out: list[TokenLogprobs | None] = [None] * count
    for place, entry in zip(places.tolist(), report.read(), strict=True):
        spread_out[place] = entry
    return spread_out
