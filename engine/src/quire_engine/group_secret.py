"""The secret that all nodes of a group share, and the proof of knowing it: an HMAC-SHA256 over what a node says."""

import hmac
from collections.abc import Mapping

from quire_common.errors import FlagsError
from quire_engine.config import SECRET_VARIABLE, ParallelOptions
from quire_engine.errors import EngineError

_LEAST_CHARACTERS = 16
_PROOF_BYTES = 32


class NotAuthenticated(EngineError):
    """The other side does not have the secret of the group."""


def check_secret(parallel: ParallelOptions, environ: Mapping[str, str]) -> None:
    """Raise FlagsError if there are several nodes and no usable secret."""
    if parallel.nodes > 1:
        read_secret(parallel, environ)


def read_secret(parallel: ParallelOptions, environ: Mapping[str, str]) -> bytes:
    """Return the secret. Raise FlagsError if it is missing or too short."""
    if parallel.secret_file is None:
        source, text = f"the variable {SECRET_VARIABLE}", environ.get(SECRET_VARIABLE, "")
    else:
        source = f"--group-secret-file {parallel.secret_file}"
        try:
            text = parallel.secret_file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise FlagsError([f"{source} cannot be read: {error}"]) from error
    secret = text.strip()
    if len(secret) < _LEAST_CHARACTERS:
        raise FlagsError(
            [f"{source}: the secret has {len(secret)} characters, and at least {_LEAST_CHARACTERS} are needed"]
        )
    return secret.encode()


def sign(secret: bytes, said: bytes, *, role: bytes, challenge: bytes) -> bytes:
    """Return ``said`` after the proof that its author knows the secret.

    role       which side says it, so that a proof cannot be sent back
    challenge  the random numbers of this exchange, always as many bytes, so that a proof cannot be repeated later
    """
    return hmac.digest(secret, role + challenge + said, "sha256") + said


def verify(secret: bytes, signed: bytes, *, role: bytes, challenge: bytes) -> bytes:
    """Return what was said. Raise NotAuthenticated if the proof is not that of ``sign`` with the same arguments."""
    proof, said = signed[:_PROOF_BYTES], signed[_PROOF_BYTES:]
    if not hmac.compare_digest(proof, hmac.digest(secret, role + challenge + said, "sha256")):
        raise NotAuthenticated("it has another group secret")
    return said
