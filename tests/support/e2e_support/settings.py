"""Settings of the scenarios from the environment: ``Settings.parse(environ)``, pure.

KUBECONFIG                 run on that cluster instead of our own
QUIRE_E2E_REGISTRY         registry from which its nodes pull quire-operator, quire-gateway and quire-engine
QUIRE_E2E_TAG              tag of these images
QUIRE_E2E_PROMETHEUS_URL   address of its Prometheus as seen from pods, if one scrapes the pods
KEEP=1                     keep release and cluster at the end
"""

from collections.abc import Mapping
from dataclasses import dataclass

from e2e_support.errors import TargetUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirCluster:
    """A user's cluster and its settings."""

    kubeconfig: str
    registry: str
    tag: str
    prometheus_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    theirs: TheirCluster | None
    """The user's cluster, or None for our own cluster on this machine."""
    keep: bool

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> "Settings":
        """Parse the environment. Raise ``TargetUnavailable`` with all missing settings."""
        keep = environ.get("KEEP", "") not in ("", "0")
        kubeconfig = environ.get("KUBECONFIG", "")
        if not kubeconfig:
            return cls(theirs=None, keep=keep)
        wanted = {
            "QUIRE_E2E_REGISTRY": "where the cluster's nodes find the images, such as registry.example/team",
            "QUIRE_E2E_TAG": "the images' tag",
        }
        missing = [f"  {name}: {meaning}" for name, meaning in wanted.items() if not environ.get(name)]
        if missing:
            raise TargetUnavailable(
                f"KUBECONFIG is {kubeconfig}: the scenarios would run on that cluster, install quire there and remove "
                "it again. For that set\n"
                + "\n".join(missing)
                + "\nor unset KUBECONFIG to run on a cluster of this machine."
            )
        return cls(
            theirs=TheirCluster(
                kubeconfig=kubeconfig,
                registry=environ["QUIRE_E2E_REGISTRY"],
                tag=environ["QUIRE_E2E_TAG"],
                prometheus_url=environ.get("QUIRE_E2E_PROMETHEUS_URL", ""),
            ),
            keep=keep,
        )
