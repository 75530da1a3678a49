"""The API group, kind, labels and annotations that the operator writes and the gateway reads."""

GROUP = "quire.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"

LABEL_DEPLOYMENT = f"{GROUP}/llmdeployment"
"""On every child: the LLMDeployment it belongs to. Watches and the gateway select by it."""
ANNOTATION_SERVED_NAME = f"{GROUP}/served-name"
"""On the Service: the served name. Only gateways of 0.1 read it; later ones read ``status.servedName``."""
ANNOTATION_SENIORITY = f"{GROUP}/seniority"
"""On the Service: when its LLMDeployment was created, and its uid. Only gateways of 0.1 read it."""
