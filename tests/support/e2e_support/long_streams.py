"""Traffic of long streams, so that a scenario can act on a replica while they run.

The known part of each stream is compared token by token, and its length is exact.
"""

import time
from collections.abc import Callable, Sequence, Set
from typing import Final

from e2e_support.traffic import Form, Kind, Prompt, Traffic, of_kind

_PLACED_SECONDS: Final = 60.0
_APART_SECONDS: Final = 1.0
_PROBE_TOKENS: Final = 50
_MOST_TOKENS: Final = 3500
"""Additional tokens after the known ones. The limit is the context length of the demo model."""


def long_streams(
    url: str,
    model: str,
    *,
    beyond: int,
    concurrency: int = 0,
    beside: Traffic | None = None,
    prompts: Sequence[Prompt] | None = None,
) -> Traffic:
    """Return long streams with `beyond` additional tokens. `begin_one_by_one` spreads them evenly.

    None finds its prompt in a prefix cache: otherwise the replica that has it would get them all.
    """
    return Traffic(
        url,
        model=model,
        prompts=prompts or of_kind(Kind.LONG),
        forms=(Form.STREAM_TOKENS,),
        salted_share=1.0,
        beyond=beyond,
        concurrency=concurrency,
        beside=beside,
    )


def begin_one_by_one(
    streams: Traffic, count: int, *, on: Set[str] = frozenset(), pause: Callable[[float], None] = time.sleep
) -> None:
    """Start streams one by one up to this number. Gateways could not balance simultaneous starts.

    Then start further ones, up to twice the number, until each of the replicas `on` has one: a gateway that balances
    well sends none to a replica that other traffic occupies.
    """
    for number in range(1, 2 * count + 1):
        if number > count and on <= set(streams.live().streams):
            break
        streams.set_concurrency(number)
        pause(_APART_SECONDS)
    streams.wait_for(
        lambda live: live.in_flight >= count and on <= set(live.streams),
        _PLACED_SECONDS,
        f"{count} long streams" + (f", and one on each of {sorted(on)}" if on else ""),
    )


def tokens_lasting(seconds: float, url: str, model: str, *, prompts: Sequence[Prompt] | None = None) -> int:
    """Return the number of tokens of a stream with this duration, because machines differ much in speed."""
    with long_streams(url, model, beyond=_PROBE_TOKENS, concurrency=1, prompts=prompts) as probe:
        probe.wait_for(lambda live: live.in_flight > 0 or live.failed > 0, _PLACED_SECONDS, "a stream to measure by")
        probe.pause()
    record = probe.result.records[0]
    per_second = record.expected_tokens / (record.ended - record.started)
    return max(_PROBE_TOKENS, min(_MOST_TOKENS, round(per_second * seconds)))
