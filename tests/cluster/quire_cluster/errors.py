"""Errors around a test cluster that the reader can fix: each message says what is wrong and what is accepted.

ClusterError
├── BinaryUnavailable   a required program is missing and cannot be built here
├── BuildFailed         `go` failed; the message ends with its last lines
├── ComponentFailed     a process exited or did not answer in time; the message ends with its log
├── MachineUnfit        this machine cannot run nodes: no root, or a program or kernel feature is missing
├── ImageBuildFailed    an image could not be built or failed its inspection; the message ends with the builder's lines
├── KubectlFailed       kubectl failed; the message is its output
└── HelmFailed          helm failed; the message is its output
"""


class ClusterError(Exception):
    """The root of all errors that a user can fix."""


class BinaryUnavailable(ClusterError):
    """A required program is missing and cannot be built here."""


class BuildFailed(ClusterError):
    """The Go toolchain failed."""


class ComponentFailed(ClusterError):
    """A process of the cluster exited early or did not become ready."""


class MachineUnfit(ClusterError):
    """The machine cannot run nodes in its current state."""


class ImageBuildFailed(ClusterError):
    """buildah or mmdebstrap failed, or the image does not meet the requirements of the Dockerfile."""


class KubectlFailed(ClusterError):
    """kubectl exited with a non-zero status."""


class HelmFailed(ClusterError):
    """helm exited with a non-zero status."""
