"""What the environment says of where and how scenarios run: ``Settings.parse(environ)``, pure.

KUBECONFIG                 run on that cluster instead of one of our own
QUIRE_E2E_REGISTRY         there: where its nodes find quire-operator, quire-gateway and quire-engine
QUIRE_E2E_TAG              there: their tag
QUIRE_E2E_PROMETHEUS_URL   there, if it has one that scrapes pods: its address as pods reach it
KEEP=1                     leave release and cluster as they are in the end
"""

from collections.abc import Mapping
from dataclasses import dataclass

from e2e_support.errors import TargetUnavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirCluster:
    """Somebody's own cluster, and what it was given."""

    kubeconfig: str
    registry: str
    tag: str
    prometheus_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    theirs: TheirCluster | None
    """None: a cluster of ours, on this machine."""
    keep: bool

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> "Settings":
        """Raises ``TargetUnavailable`` with all that is missing."""
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
