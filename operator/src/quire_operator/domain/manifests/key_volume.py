"""The API keys of ``spec.auth`` in a pod: a volume for the engine, and an init container that detects missing keys.

Part of ``pod_template``. A volume whose secret is missing blocks the whole pod, and the kubelet reports that only in
events. So the volume is optional, and an init container that runs first refers to the key in its environment. Without
the secret, the kubelet then reports CreateContainerConfigError in the pod's status. The init container ends at once, so
no running container has the keys in its environment. The engine reads the file, and reads it again when it changes.
"""

from quire_common.contract.engine import ENGINE_COMMAND

JSON = dict[str, object]

VOLUME = "api-keys"
CHECK = "check-api-keys"
SECRET_KEY = "keys"
"""The key of the secret that contains the file."""
_PATH = "/etc/quire/api-keys"
KEY_FILE = f"{_PATH}/{SECRET_KEY}"

_MODE = 0o440  # the pod's user is in the volume's group


def key_volume(secret: str) -> JSON:
    """Return the volume, which contains only the key file of the secret."""
    items = [{"key": SECRET_KEY, "path": SECRET_KEY}]
    return {"name": VOLUME, "secret": {"secretName": secret, "items": items, "defaultMode": _MODE, "optional": True}}


def key_mount() -> JSON:
    """Return the mount of the engine container."""
    return {"name": VOLUME, "mountPath": _PATH, "readOnly": True}


def check_container(secret: str, *, image: JSON, security: JSON) -> JSON:
    """Return the init container, which can start only if the secret exists and has the key."""
    reference = {"name": secret, "key": SECRET_KEY}
    return {
        "name": CHECK,
        **image,
        "command": [ENGINE_COMMAND],
        "args": ["--version"],
        "env": [{"name": "API_KEYS", "valueFrom": {"secretKeyRef": reference}}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security,
    }
