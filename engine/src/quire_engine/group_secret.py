"""The secret that all nodes of a group share, and the proof of knowing it.

Both sides of a connection send a random number and the HMAC-SHA256 of both numbers under the secret (a mutual
challenge and response). The node that connects proves it first: a program that only listens learns nothing.
"""

import hashlib
import hmac
import secrets
import socket
from collections.abc import Mapping

from quire_common.errors import FlagsError
from quire_engine.config import SECRET_VARIABLE, ParallelOptions
from quire_engine.errors import EngineError

_GREETING = b"quire-group 1\n"
_NONCE_BYTES, _PROOF_BYTES = 32, hashlib.sha256().digest_size
_LEAST_CHARACTERS = 16
_ACCEPTED, _REFUSED = b"\1", b"\0"


class NotAuthenticated(EngineError):
    """The other side of a connection does not have the secret of the group."""


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


def accept(connection: socket.socket, secret: bytes) -> None:
    """Authenticate a node that has connected. Raise NotAuthenticated, or OSError if it is gone or too slow."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(_GREETING + nonce)
    answer = _read(connection, _NONCE_BYTES + _PROOF_BYTES)
    other, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"connects", nonce, other)):
        connection.sendall(_REFUSED)
        raise NotAuthenticated("it has another group secret")
    connection.sendall(_ACCEPTED + _proof(secret, b"listens", nonce, other))


def authenticate(connection: socket.socket, secret: bytes) -> None:
    """Authenticate this node to one that listens, and that one to this. Raise NotAuthenticated or OSError."""
    greeting = _read(connection, len(_GREETING) + _NONCE_BYTES)
    if not greeting.startswith(_GREETING):
        raise NotAuthenticated("another program or another version of quire-engine listens there")
    nonce, own = greeting[len(_GREETING) :], secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own + _proof(secret, b"connects", nonce, own))
    if _read(connection, 1) != _ACCEPTED:
        raise NotAuthenticated("it has another group secret and refuses this one")
    if not hmac.compare_digest(_read(connection, _PROOF_BYTES), _proof(secret, b"listens", nonce, own)):
        raise NotAuthenticated("it does not have the group secret")


def _proof(secret: bytes, role: bytes, nonce: bytes, other: bytes) -> bytes:
    return hmac.digest(secret, role + nonce + other, "sha256")


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return bytes(parts)
