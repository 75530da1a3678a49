"""Names in Kubernetes: the API, the labels and annotations, and the names of children."""

import re

from quire_common.contract.kubernetes import ADAPTER_KIND as ADAPTER_KIND
from quire_common.contract.kubernetes import ADAPTER_PLURAL as ADAPTER_PLURAL
from quire_common.contract.kubernetes import ANNOTATION_SENIORITY as ANNOTATION_SENIORITY
from quire_common.contract.kubernetes import ANNOTATION_SERVED_NAME as ANNOTATION_SERVED_NAME
from quire_common.contract.kubernetes import API_VERSION as API_VERSION
from quire_common.contract.kubernetes import CANARY_SUFFIX as CANARY_SUFFIX
from quire_common.contract.kubernetes import GROUP as GROUP
from quire_common.contract.kubernetes import KIND as KIND
from quire_common.contract.kubernetes import LABEL_DEPLOYMENT as LABEL_DEPLOYMENT
from quire_common.contract.kubernetes import PLURAL as PLURAL
from quire_common.contract.kubernetes import VERSION as VERSION

FIELD_MANAGER = "quire"

LABEL_APP = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
COMPONENT, CANARY_COMPONENT, WORKER_COMPONENT = "engine", "engine-canary", "engine-worker"
"""Values of the label component on the pods of the stable revision, on those of a canary, and on those that work for
the leader of a group."""
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
ANNOTATION_REFRESH_MODEL = "quire.dev/refresh-model"
"""On an LLMDeployment: another value makes the operator resolve a moving model source again."""
ANNOTATION_TEMPLATE = "quire.dev/template"
"""On a Deployment: the digest of the pod template that was applied to it; on that of a canary, its revision."""
ANNOTATION_ADAPTERS = "quire.dev/adapters"
"""On a pod: a digest of its list of adapters. A change makes the kubelet renew the pod's copy of the list at once."""
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"

ANNOTATION_PROGRESS_DEADLINE = "quire.dev/progress-deadline-seconds"
"""On a LeaderWorkerSet, whose controller knows no deadline: the maximum time between two steps of a rollout."""
LABEL_GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
LABEL_GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
LABEL_GROUP_REVISION = "leaderworkerset.sigs.k8s.io/template-revision-hash"
"""Labels that LeaderWorkerSets give to pods: the group, a hash that is unique to it, and its revision."""

HEADLESS_SUFFIX, CACHE_CLAIM_SUFFIX, ADAPTERS_SUFFIX = "-headless", "-models", "-adapters"
GROUP_SUFFIX = "-group"
"""Suffixes of children's names; the others have the name of the LLMDeployment. A LeaderWorkerSet needs one, because it
creates a headless Service with its own name."""
_MAX_LABEL = 63
MAX_NAME_LENGTH = _MAX_LABEL - len(HEADLESS_SUFFIX)
"""The longest name of an LLMDeployment whose longest child name fits the 63 characters of a Service."""
_GROUP_REVISION_LENGTH = len("-999-0123456789")
"""The label of a StatefulSet's revision has the index of a group and a hash after the name of the LeaderWorkerSet."""
MAX_GROUP_NAME_LENGTH = _MAX_LABEL - len(GROUP_SUFFIX) - _GROUP_REVISION_LENGTH
"""The longest name of an LLMDeployment whose replicas are groups of pods."""

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def name_problem(name: str) -> str | None:
    """Return why an LLMDeployment cannot have this name, or None."""
    if _DNS_LABEL.fullmatch(name) is None:
        return "must be a DNS label: lower-case letters, digits and '-', starting with a letter"
    if len(name) > MAX_NAME_LENGTH:
        return (
            f"must be at most {MAX_NAME_LENGTH} characters, so that its Services can be named after it; has {len(name)}"
        )
    return None
