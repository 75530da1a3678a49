"""How a pod comes by the API keys of ``spec.auth``: a volume for the engine, and a container that finds them missing.

Part of ``pod_template``. A volume whose secret is missing keeps the whole pod waiting, and the kubelet tells that in
events only. So the volume may be empty, and an init container that runs before anything else names the key in its
environment: for that the kubelet says CreateContainerConfigError in the pod's status, until the secret is there. It
ends at once; what it was given is in no container that stays. The engine reads the file, and again when it changes.
"""

from quire_common.contract.engine import ENGINE_COMMAND

JSON = dict[str, object]

VOLUME = "api-keys"
CHECK = "check-api-keys"
SECRET_KEY = "keys"
"""The key of the secret that holds the file."""
_PATH = "/etc/quire/api-keys"
KEY_FILE = f"{_PATH}/{SECRET_KEY}"

_MODE = 0o440  # the pod's user is in the volume's group


def key_volume(secret: str) -> JSON:
    """The volume, with nothing of the secret in it but the keys."""
    items = [{"key": SECRET_KEY, "path": SECRET_KEY}]
    return {"name": VOLUME, "secret": {"secretName": secret, "items": items, "defaultMode": _MODE, "optional": True}}


def key_mount() -> JSON:
    """Where the engine sees it."""
    return {"name": VOLUME, "mountPath": _PATH, "readOnly": True}


def check_container(secret: str, *, image: JSON, security: JSON) -> JSON:
    """Runs, with the engine's own image, only where the secret is there and has the key."""
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
