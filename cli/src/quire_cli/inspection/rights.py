"""The permission that is missing according to the API server's refusal. Pure."""

import re
from typing import NamedTuple

_DENIED = re.compile(r'cannot (\w+) resource "([^"]+)" in API group "([^"]*)"(?: in the namespace "([^"]+)")?')


class Right(NamedTuple):
    """A permission for one kind of request."""

    verb: str
    resource: str
    """The resource, with its subresource."""
    group: str
    """Empty for the core group."""
    namespace: str | None
    """None: the whole cluster."""

    def __str__(self) -> str:
        where = "in all namespaces" if self.namespace is None else f"in namespace {self.namespace}"
        return f"{self.verb} {self.resource}{'.' if self.group else ''}{self.group} {where}"

    @property
    def question(self) -> str:
        """The command that checks this permission."""
        kind, _, sub = self.resource.partition("/")
        scope = "--all-namespaces" if self.namespace is None else f"--namespace {self.namespace}"
        sub = f" --subresource {sub}" if sub else ""
        return f"kubectl auth can-i {self.verb} {kind}{'.' if self.group else ''}{self.group}{sub} {scope}"


def missing_right(refusal: str) -> Right | None:
    """Return the permission that a refusal names, or None if it names none."""
    denied = _DENIED.search(refusal)
    return None if denied is None else Right(*denied.groups())


def readable(refusal: str) -> str:
    """Return a refusal as a sentence for the user."""
    right = missing_right(refusal)
    return refusal if right is None else f"you are not allowed to {right}"
