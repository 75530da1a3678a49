"""The contents of a registry: the manifest of a tag. It only reads; buildah pushes.

It implements the OCI distribution API with the standard library, without logins. With a registry that requires a login,
images count as missing; `buildah push`, which has the credentials, then finds nothing to send.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire_cluster.errors import ImageBuildFailed
from quire_cluster.nodes.plan import REGISTRY

OWN: Final = REGISTRY
# Without TLS on this machine only.
PLAIN: Final = ("localhost", "127.0.0.1", OWN.partition(":")[0])
_MANIFESTS: Final = "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """A registry at `address`, the prefix of repository names: `10.77.0.1:5000`, `registry.example/team`."""

    address: str

    @property
    def plain_http(self) -> bool:
        return self.address.partition("/")[0].partition(":")[0] in PLAIN

    def answers(self) -> bool:
        host = self.address.partition("/")[0]
        try:
            with urllib.request.urlopen(f"{self._scheme}://{host}/v2/", timeout=_SECONDS):
                return True
        except OSError:
            return False

    def manifest(self, repository: str, tag: str) -> Mapping[str, Any] | None:
        """Return the manifest, or None if it does not exist."""
        return self._get(repository, f"manifests/{tag}")

    def description(self, repository: str, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the image's configuration and history in the format of the OCI image specification."""
        found = self._get(repository, f"blobs/{manifest['config']['digest']}")
        if found is None:
            raise ImageBuildFailed(f"the registry {self.address} has a manifest of {repository} without what it names")
        return found

    @property
    def _scheme(self) -> str:
        return "http" if self.plain_http else "https"

    def _get(self, repository: str, what: str) -> Mapping[str, Any] | None:
        host, _, folder = self.address.partition("/")
        path = "/".join(part for part in (folder, repository) if part)
        url = f"{self._scheme}://{host}/v2/{path}/{what}"
        request = urllib.request.Request(url, headers={"Accept": _MANIFESTS})
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as refusal:
            refusal.close()
            if refusal.code in (401, 403, 404):
                return None
            raise ImageBuildFailed(f"the registry {self.address} answered {url} with {refusal.code}") from None
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ImageBuildFailed(
                f"the registry {self.address} cannot be reached: {reason}\n"
                "The test cluster's runs while the cluster does (make cluster-up)."
            ) from None
