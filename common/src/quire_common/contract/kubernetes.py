"""The API group, kind, labels and annotations that the operator writes and the gateway reads."""

GROUP = "quire.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "LLMDeployment"

LABEL_DEPLOYMENT = f"{GROUP}/llmdeployment"
"""On every child: the LLMDeployment it belongs to. Watches and the gateway select by it."""
ANNOTATION_SERVED_NAME = f"{GROUP}/served-name"
"""On the Service: the model name that clients ask for."""
ANNOTATION_SENIORITY = f"{GROUP}/seniority"
"""On the Service: when its LLMDeployment was created, and its uid. Of two that claim one served name, the one with the
lesser text has it. It outlives a Service that is recreated."""
