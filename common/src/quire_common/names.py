"""Checks of names and addresses that users write in specs, flags and model sources, and hosts as URLs contain them."""

import re
from urllib.parse import urlsplit

_DNS_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_OBJECT_NAME = 253


def object_name_problem(name: str) -> str | None:
    """Return why no Kubernetes object (a Secret, a claim) can have this name, or None if one can."""
    if len(name) > _MAX_OBJECT_NAME or _DNS_SUBDOMAIN.fullmatch(name) is None:
        return "must be the name of a Kubernetes object: lower-case letters, digits, '-' and '.'"
    return None


def is_http_url(text: str) -> bool:
    """Return True for an http or https URL with a host."""
    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and re.search(r"\s", text) is None


def url_host(host: str) -> str:
    """Return a host as a URL contains it: an IPv6 address has brackets."""
    return f"[{host}]" if ":" in host else host
