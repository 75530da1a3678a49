"""The requests whose replicas died, by the digest of their body: pure state, without a clock. Under ``proxy``.

A poisonous request kills every engine that runs it. Nothing distinguishes it from the requests that are lost with it,
so each of them is retried. A body that met two deaths without a complete answer between them is quarantined: requests
with it are refused, so that a client that repeats its request does not end one engine after the other.

A harmless body can meet two deaths too. So after a minute, one request with the body is sent to a replica again. Its
complete answer ends the quarantine; another death renews it for ten minutes.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b

MAX_DEATHS = 2
"""The deaths after which a request fails and its body is quarantined."""
FIRST_SECONDS, NEXT_SECONDS = 60.0, 600.0
"""The lengths of the first quarantine of a body and of each further one."""
FORGET_SECONDS = 2 * NEXT_SECONDS
"""The time after its last death after which a body is unknown again."""
_MAX_BODIES = 4096
"""The bodies that are remembered; those whose last death is the longest ago are forgotten first."""


def digest_of(path: str, body: bytes | bytearray) -> bytes:
    """Return the digest by which the requests with this path and body are known."""
    digest = blake2b(path.encode(errors="surrogateescape") + b"\0", digest_size=16)
    digest.update(body)
    return digest.digest()


@dataclass(slots=True)
class _Record:
    deaths: int = 0
    last_death: float = -math.inf
    last_deaths: dict[str, float] = field(default_factory=dict)
    """The time of the last death of each replica."""
    until: float = -math.inf
    """The end of the quarantine."""


class Quarantine:
    def __init__(self) -> None:
        self._records: OrderedDict[bytes, _Record] = OrderedDict()

    def admit(self, digest: bytes, now: float) -> float:
        """Return how long requests with this body are refused; 0 admits this one.

        The first request after a quarantine renews it until its answer, so that it is the only one with this body.
        """
        record = self._find(digest, now)
        if record is None or record.deaths < MAX_DEATHS:
            return 0.0
        if now < record.until:
            return record.until - now
        record.until = now + FIRST_SECONDS
        return 0.0

    def record_death(self, digest: bytes, replica: str, *, sent: float, now: float) -> bool:
        """Record that a replica died with a request that was ``sent`` then; return whether its body is quarantined.

        The requests with one body that a replica runs as it dies meet one death together.
        """
        record = self._records[digest] = self._find(digest, now) or _Record()
        self._records.move_to_end(digest)
        if sent >= record.last_deaths.get(replica, -math.inf):
            record.deaths += 1
            record.last_death = record.last_deaths[replica] = now
            if record.deaths >= MAX_DEATHS:
                record.until = now + (FIRST_SECONDS if record.deaths == MAX_DEATHS else NEXT_SECONDS)
        if len(self._records) > _MAX_BODIES:
            self._records.popitem(last=False)
        return record.deaths >= MAX_DEATHS

    def record_answer(self, digest: bytes) -> None:
        """Record a complete answer: the body is harmless."""
        self._records.pop(digest, None)

    def _find(self, digest: bytes, now: float) -> _Record | None:
        record = self._records.get(digest)
        if record is not None and now - record.last_death >= FORGET_SECONDS:
            del self._records[digest]
            return None
        return record
