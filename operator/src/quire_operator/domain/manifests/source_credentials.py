"""The credentials of a download in a pod: environment variables from the secret that the spec names.

Part of ``pod_template``. The variables are those of each source's own tools. Without the secret or key, the kubelet
does not create the container and reports that in the pod's status, so the operator needs no permission to read secrets.
"""

from quire_operator.domain.resource import BucketSource, HubSource, RemoteSource

JSON = dict[str, object]

HUB_TOKEN_KEY = "token"
AWS_REQUIRED = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
AWS_OPTIONAL = ("AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL")


def credentials_environment(source: RemoteSource, secret: str | None, *, optional: bool = False) -> list[JSON]:
    """Return the variables; none without a secret, because then the pod's own identity counts or none is needed.

    With ``optional``, the container starts without the secret too.
    """
    if secret is None:
        return []
    match source:
        case HubSource():
            return [_variable("HF_TOKEN", secret, HUB_TOKEN_KEY, optional=optional)]
        case BucketSource():
            required = [_variable(key, secret, key, optional=optional) for key in AWS_REQUIRED]
            return required + [_variable(key, secret, key, optional=True) for key in AWS_OPTIONAL]


def adapter_credentials(secret: str) -> list[JSON]:
    """Return the variables for all kinds of sources that one secret may have credentials for."""
    keys = {"HF_TOKEN": HUB_TOKEN_KEY} | {key: key for key in (*AWS_REQUIRED, *AWS_OPTIONAL)}
    return [_variable(name, secret, key, optional=True) for name, key in keys.items()]


def _variable(name: str, secret: str, key: str, *, optional: bool = False) -> JSON:
    reference: JSON = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}
