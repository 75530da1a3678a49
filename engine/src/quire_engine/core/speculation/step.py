"""The drafts of one step: they enter its plan, and sequences advance by those that were accepted."""

from quire_engine.core.batch import Batch, DraftedLines, RunnerOutput
from quire_engine.core.kv_manager import KVManager
from quire_engine.core.plan import Plan
from quire_engine.core.policy import Policy
from quire_engine.core.sequence import Sequence
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stats import Counters


def add_drafts(plan: Plan, kv: KVManager, sequence: Sequence, drafts: list[int], *, others: int) -> int:
    """Add drafts after the last token of the next sequence of the plan; return how many have room.

    ``others`` sequences come after it. ``num_computed`` counts drafts only when they are accepted.
    """
    end = sequence.num_tokens
    covered = kv.extend_for_drafts(sequence, end + len(drafts), others=others)
    drafts = drafts[: covered - end]
    if drafts:
        plan.token_ids += drafts
        plan.drafted[len(plan.sequences)] = len(drafts)
    return len(drafts)


def drafted_lines(batch: Batch, token_ids: list[int]) -> list[DraftedLines]:
    """Return the lines of each sequence that samples in a batch with drafts, whose inputs are ``token_ids``."""
    found: list[DraftedLines] = []
    line = end = 0
    for scheduled, drafts, samples in zip(batch.num_scheduled, batch.num_drafts, batch.samples, strict=True):
        end += scheduled
        if samples:
            found.append(DraftedLines(line, token_ids[end - drafts : end]))
            line += 1 + drafts
    return found


def grown(sampled: list[Sequence], counts: list[int], waiting: Policy) -> list[Sequence]:
    """Let sequences grow by the tokens that a step sampled beyond one each; return the sequence of each token.

    Those that were preempted while the step was in flight are in ``waiting``.
    """
    for sequence, count in zip(sampled, counts, strict=True):
        assert count == 1 or (count > 1 and (sequence.finished or sequence.num_pending == 1))
        sequence.num_tokens += count - 1
        sequence.num_pending += count - 1
        if count > 1 and sequence.row is None and not sequence.finished:
            waiting.grew(sequence, count - 1)
    return [sequence for sequence, count in zip(sampled, counts, strict=True) for _ in range(count)]


def observe_speculation(
    speculation: Speculation, flight: Plan, output: RunnerOutput, *, elapsed: float, counters: Counters
) -> None:
    """Advance sequences by their accepted drafts, and learn from the step.

    ``elapsed`` is the time since the output of the step before, or 0 if it is not known.
    """
    if speculation.observe_passed(flight.batch.step, max(elapsed, output.run_seconds)):
        return
    if flight.batch.num_drafts:
        assert output.counts is not None
        columns = zip(flight.sampled, flight.drafts_of_sampled(), output.counts, strict=True)
        for sequence, drafts, count in columns:
            counters.scheduled_tokens += count - 1
            if drafts and not sequence.finished:
                if sequence.row is not None:  # else it was preempted meanwhile, and computes these tokens again
                    sequence.num_computed += count - 1
                speculation.verified(sequence, drafts, count - 1)
                counters.count_drafts(drafts, count - 1)
    passes = max(flight.batch.num_drafts, default=0)
    if flight.prompts.tokens or output.is_first:
        draft_seconds = 0.0 if output.is_first else output.draft_seconds
        speculation.observe_prompts(passes=passes, draft_seconds=draft_seconds, elapsed=elapsed, step=flight.batch.step)
        return
    speculation.observe_step(
        flight.batch.num_tokens,
        output.prepare_seconds + output.run_seconds + output.sample_seconds,
        sequences=len(flight.sampled),
        sampled=len(output.token_ids),
        passes=passes,
        draft_seconds=output.draft_seconds,
        # The inputs of a step may be prepared while the one before it runs, but no step takes less than its own time.
        elapsed=max(elapsed, output.run_seconds + output.sample_seconds + output.draft_seconds),
        step=flight.batch.step,
    )
