"""``spec.engine.adapters``: the room of each replica for LoRA adapters, which LLMAdapters then name."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from quire_operator.domain.resource.field_kinds import Integer, SecretReference
from quire_operator.domain.resource.schema import Rule

_IN_MEMORY_PER_SLOT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """The slots for adapters, and how many adapters stay in host memory."""

    max_rank: Annotated[
        int,
        Integer(
            "Highest rank of an adapter. Each slot has room for this rank.",
            minimum=1,
            maximum=512,
            flags=("max-lora-rank",),
        ),
    ] = 16
    max_loaded: Annotated[
        int,
        Integer(
            "Number of slots: the number of different adapters that one step can use. Requests for others wait for a "
            "slot.",
            minimum=1,
            maximum=4096,
            flags=("max-loras",),
        ),
    ] = 8
    max_in_memory: Annotated[
        int | None,
        Integer(
            "Number of adapters that stay in host memory. Others are read from disk again when a request needs them. "
            "Default is 4 times maxLoaded.",
            minimum=1,
            maximum=65536,
            flags=("max-cpu-loras",),
        ),
    ] = None
    credentials_secret: Annotated[
        str | None,
        SecretReference(
            "Secret in this namespace with the credentials for the sources of LLMAdapters. It may have the keys of "
            "several kinds of sources: `token` for hf://, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, "
            "AWS_REGION and AWS_ENDPOINT_URL for s3://. A store that a source names by ?endpoint= gets no credentials "
            "unless it is AWS_ENDPOINT_URL. Replicas read the secret when they start. It is set here because a "
            "running pod cannot get another secret.",
            secret="Name of the secret.",
        ),
    ] = None

    RULES: ClassVar = (
        Rule(
            at="maxInMemory",
            # has(): the server evaluates this rule before it has written the defaults.
            cel="!has(self.maxInMemory) || !has(self.maxLoaded) || self.maxInMemory >= self.maxLoaded",
            holds=lambda slots, document: slots.in_memory >= slots.max_loaded,
            message="must be at least maxLoaded: an adapter in a slot is in host memory too",
        ),
    )

    @property
    def in_memory(self) -> int:
        """The number of adapters in host memory."""
        return _IN_MEMORY_PER_SLOT * self.max_loaded if self.max_in_memory is None else self.max_in_memory
