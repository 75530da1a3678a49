"""One request on its way through an engine, and back again where it is preempted."""

from quire_cli.simulation.run import Outcome
from quire_cli.simulation.traces import Request


class Sequence:
    """``known`` tokens, prompt and output so far, of which ``computed`` lie in the KV cache."""

    def __init__(self, request: Request, *, order: int, prefix_block_tokens: int) -> None:
        self.order = order
        self.arrival = request.time
        self.prompt_tokens = request.prompt_tokens
        self.output_tokens = request.output_tokens
        # Only whole blocks can be shared, and the last token of a prompt is always computed.
        self.prefix = request.prefix_blocks[: request.prompt_tokens // prefix_block_tokens]
        self.num_prefix = min(len(self.prefix), (request.prompt_tokens - 1) // prefix_block_tokens)
        self.known = request.prompt_tokens
        self.computed = 0
        self.generated = 0
        self.decoding_since: int | None = None
        """The engine's count of decode steps when it began to decode; None while it does not."""
        self.private_blocks = 0
        self.shared = 0
        """The number of blocks of ``prefix`` that it uses in the prefix cache, from the first one on."""
        self.replica: str | None = None
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.finish: float | None = None
        self.outcome = Outcome.UNFINISHED
        self.own_prefill_seconds: float | None = None
        """None before it was admitted for the first time."""
        self.cached = 0
        self.preemptions = 0
