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
ANNOTATION_HOLD_TIMEOUT = f"{GROUP}/hold-timeout-seconds"
"""On the Service: the longest time that the gateway holds a request while no replica is ready, in seconds."""
ANNOTATION_MAX_HELD = f"{GROUP}/max-held"
"""On the Service: the number of requests for this model that one gateway may hold."""
ANNOTATION_START_UP = f"{GROUP}/start-up-seconds"
"""On the Service: the learned time in which a replica becomes ready, in seconds. The gateway derives Retry-After and
the default hold time from it."""
