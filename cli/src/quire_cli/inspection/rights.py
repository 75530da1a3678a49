"""Which right the API server's refusal says is missing, in words. Pure."""

import re
from typing import NamedTuple

_DENIED = re.compile(r'cannot (\w+) resource "([^"]+)" in API group "([^"]*)"(?: in the namespace "([^"]+)")?')


class Right(NamedTuple):
    verb: str
    resource: str
    """With its subresource."""
    group: str
    """Empty for the core."""
    namespace: str | None
    """None: in the whole cluster."""

    def __str__(self) -> str:
        where = "in all namespaces" if self.namespace is None else f"in namespace {self.namespace}"
        return f"{self.verb} {self.resource}{'.' if self.group else ''}{self.group} {where}"

    @property
    def question(self) -> str:
        """The command that tells whether one has it."""
        kind, _, sub = self.resource.partition("/")
        scope = "--all-namespaces" if self.namespace is None else f"--namespace {self.namespace}"
        sub = f" --subresource {sub}" if sub else ""
        return f"kubectl auth can-i {self.verb} {kind}{'.' if self.group else ''}{self.group}{sub} {scope}"


def missing_right(refusal: str) -> Right | None:
    """None where the refusal names none."""
    denied = _DENIED.search(refusal)
    return None if denied is None else Right(*denied.groups())


def in_words(refusal: str) -> str:
    right = missing_right(refusal)
    return refusal if right is None else f"you have not the right to {right}"
