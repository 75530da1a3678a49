"""Checks of names and addresses that users write in specs, flags and model sources."""

import re

_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_OBJECT_NAME = 253


def object_name_problem(name: str) -> str | None:
    """Return why no Kubernetes object (a Secret, a claim) can have this name, or None if one can."""
    if len(name) > _MAX_OBJECT_NAME or _DNS_SUBDOMAIN.fullmatch(name) is None:
        return "must be the name of a Kubernetes object: lower-case letters, digits, '-' and '.'"
    return None


def is_http_url(text: str) -> bool:
    """Return True for an http or https URL with a host."""
    return re.fullmatch(r"https?://[^\s/]+(/\S*)?", text) is not None
