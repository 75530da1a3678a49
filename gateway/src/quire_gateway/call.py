"""One request as the gateway serves it, after its body was read."""

from dataclasses import dataclass

from aiohttp import web

from quire_common.allowance import Allowance
from quire_gateway.bodies import Body
from quire_gateway.fleet import Pool
from quire_gateway.hold_queue import HoldTicket
from quire_gateway.limits import Charge
from quire_gateway.resumable import OpenStream
from quire_gateway.wait_comments import WaitComments


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request after its body was read."""

    request: web.Request
    pool: Pool
    ticket: HoldTicket
    """Its right to wait while no replica can serve it."""
    body: Body
    digest: bytes
    """The digest of its path and body, by which the quarantine knows it."""
    allowance: Allowance | None
    charge: Charge | None
    """The limits of its tenant, and what it has used of them; None without limits."""
    prompt_tokens: float
    """The probable number of tokens of its prompt."""
    blocks: tuple[int, ...]
    """The block hashes of its prompt."""
    track: str
    """The track that its first replica should be on."""
    comments: WaitComments | None
    """The comments until a replica answers; None for an answer without them."""
    id: str
    started: float
    stream: OpenStream
    """The stream to the client."""

    @property
    def current_track(self) -> str:
        """The track that its next replica should be on: a stream stays on the track that began it."""
        return self.stream.track or self.track
