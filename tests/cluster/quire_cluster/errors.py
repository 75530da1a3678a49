"""What can go wrong around a test cluster and is the reader's to mend: each message says what, and what would be right.

ClusterError
├── BinaryUnavailable   a program is needed that is neither here nor can be built here
├── BuildFailed         `go` ran and failed; the message ends with its last lines
├── ComponentFailed     a started process ended or did not answer in time; the message ends with its log
├── MachineUnfit        this machine cannot hold nodes as it is: no root, a program or a part of the kernel missing
├── ImageBuildFailed    an image could not be made, or is not as it has to be; the message ends with the builder's lines
├── KubectlFailed       kubectl refused; the message is what it wrote
└── HelmFailed          helm refused; the message is what it wrote
"""


class ClusterError(Exception):
    """The root: whatever a person can act on."""


class BinaryUnavailable(ClusterError):
    """A program is needed that is neither here nor can be built here."""


class BuildFailed(ClusterError):
    """The Go toolchain ran and did not succeed."""


class ComponentFailed(ClusterError):
    """A process of the cluster ended early or did not become ready."""


class MachineUnfit(ClusterError):
    """Nodes cannot be made on this machine as it is."""


class ImageBuildFailed(ClusterError):
    """buildah or mmdebstrap did not succeed, or what they made breaks a promise of the Dockerfile."""


class KubectlFailed(ClusterError):
    """kubectl ended with a non-zero status."""


class HelmFailed(ClusterError):
    """helm ended with a non-zero status."""
