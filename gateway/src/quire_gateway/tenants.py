"""The tenants behind API keys, and the values by which engines know them.

Under ``app``, which finds the key of a request; ``headers`` states the tenant to the replica. A key never leaves the
gateway, because a user who publishes a model could collect the keys of its clients. A value is of no use to the engine
that reads it, because the engines of other LLMDeployments know the same tenant by other values (ADR 0140).
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from quire_common.key_file import Key, KeyFile

_PURPOSE = b"quire: tenants of a gateway"
_ITERATIONS = 50_000
"""Tens of milliseconds per version of the file. They slow down guesses at weak keys by an engine that knows a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    name: str
    secret: bytes

    def value_for(self, audience: str) -> str:
        """Return the value that an audience knows the tenant by: all replicas of an LLMDeployment are one audience."""
        # Names of keys have no line breaks, so no two pairs give the same text.
        return hmac.digest(self.secret, f"{self.name}\n{audience}".encode(), "sha256").hex()


TENANT = web.RequestKey("tenant", Tenant)
"""The key under which a request stores its tenant; a gateway without keys stores none."""


class Tenants:
    """The tenants of a key file. Gateways with the same keys compute the same values, and need no other secret."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys
        self._derived_from = keys.current
        self._secret = _secret_of(keys.current)

    def tenant_of(self, key: Key) -> Tenant:
        """Return the tenant of a key that the file has."""
        if (keys := self._keys.current) is not self._derived_from:
            self._derived_from, self._secret = keys, _secret_of(keys)
        return Tenant(name=key.tenant, secret=self._secret)


def _secret_of(keys: Sequence[Key]) -> bytes:
    """Return the secret of a gateway. It depends on every key, and neither on their order nor on names and limits."""
    digests = b"".join(sorted({key.digest for key in keys}))
    return hashlib.pbkdf2_hmac("sha256", digests, _PURPOSE, _ITERATIONS)
