"""TLS files for tests of listeners: a certificate as cert-manager writes it, and contexts of clients."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization

from quire_common.tls import TlsFiles

END = datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC)
LATE_END = datetime(2050, 6, 1, 12, 0, tzinfo=UTC)
"""From 2050 on, certificates write years with four digits."""


def issue(authority: trustme.CA, folder: Path, end: datetime = END) -> TlsFiles:
    """Return a certificate for this machine, as cert-manager writes it to a Secret."""
    leaf = authority.issue_cert("127.0.0.1", "localhost", not_after=end)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    (folder / "tls.key").write_bytes(leaf.private_key_pem.bytes())
    return TlsFiles(certfile=folder / "tls.crt", keyfile=folder / "tls.key")


def encrypted(key: Path, password: bytes) -> bytes:
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )


def trusting(authority: trustme.CA, identity: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if identity is not None:
        context.load_cert_chain(identity / "tls.crt", identity / "tls.key")
    return context
