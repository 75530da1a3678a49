"""Keys and certificates of a test cluster, created with the `openssl` program.

They protect only loopback and a temporary folder, but satisfy the strict verification of Python 3.13 (key usage and key
identifiers).
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire_cluster.errors import BinaryUnavailable
from quire_cluster.shell import run

DAYS: Final = "365"
NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
CONFIG: Final = """\
[req]
distinguished_name = name
prompt = no
[name]
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[leaf]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    certificate: Path
    key: Path


class Authority:
    """A certificate authority in its own folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "openssl.cnf"
        self.pair = _pair(folder, "ca")

    @property
    def service_account_key(self) -> Path:
        """Return the path of the key that signs the tokens of ServiceAccounts."""
        return self._folder / "service-accounts.key"

    def create(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._config.write_text(CONFIG)
        self._openssl(
            *("req", "-x509", *NEW_KEY, "-days", DAYS, "-subj", "/CN=quire-test-authority", "-extensions", "authority"),
            *("-keyout", str(self.pair.key), "-out", str(self.pair.certificate), "-config", str(self._config)),
        )
        self._openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(self.service_account_key))

    def issue(self, name: str, *, subject: str, alternative_names: str) -> KeyPair:
        """Issue a certificate. `subject` (/O=…/CN=…) and `alternative_names` (IP:…,DNS:…) have openssl's form."""
        pair = _pair(self._folder, name)
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.cnf"
        extensions.write_text(f"{CONFIG}subjectAltName = {alternative_names}\n")
        self._openssl(
            *("req", *NEW_KEY, "-subj", subject, "-config", str(self._config)),
            *("-keyout", str(pair.key), "-out", str(request)),
        )
        self._openssl(
            *("x509", "-req", "-in", str(request), "-days", DAYS, "-CAcreateserial"),
            *("-CA", str(self.pair.certificate), "-CAkey", str(self.pair.key)),
            *("-extfile", str(extensions), "-extensions", "leaf", "-out", str(pair.certificate)),
        )
        return pair

    def issued(self, name: str) -> KeyPair:
        """Return the certificate that `issue` created under this name before."""
        return _pair(self._folder, name)

    def _openssl(self, *arguments: str) -> None:
        program = shutil.which("openssl")
        if program is None:
            raise BinaryUnavailable(
                "the test cluster's certificates are made with `openssl`, which is not on PATH; "
                "install it (Debian: apt-get install openssl)"
            )
        run([program, *arguments])


def _pair(folder: Path, name: str) -> KeyPair:
    return KeyPair(certificate=folder / f"{name}.crt", key=folder / f"{name}.key")
