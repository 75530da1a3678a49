"""A trace as the requests of a simulation, cut and bent as ``quire bench`` cuts and bends it. Pure."""

from collections.abc import Sequence

from quire_cli.bench.traces import Replay, TraceRow, shaped
from quire_cli.simulation.scenario import Request

AS_IT_IS = Replay()


def requests_of(rows: Sequence[TraceRow], replay: Replay = AS_IT_IS) -> list[Request]:
    """In order of arrival. Their prefix blocks stand for ``replay.prefix_block_tokens`` each."""
    return [
        Request(
            time=row.arrival_seconds,
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            prefix_blocks=row.prefix_blocks,
        )
        for row in shaped(rows, replay)
    ]
