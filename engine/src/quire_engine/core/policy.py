"""Who goes first: the order in which waiting sequences are admitted and running ones keep their blocks.

A policy gives each request its place once, when it arrives. ``arrival`` counts up, so that no two places are equal.
"""

from typing import Literal, Protocol

from quire_engine.core.sequence import Order, Request

PolicyName = Literal["fcfs", "priority"]


class Policy(Protocol):
    def order(self, request: Request, *, arrival: int) -> Order: ...


class FirstComeFirstServed:
    def order(self, request: Request, *, arrival: int) -> Order:
        return (0, arrival)


class ByPriority:
    """The smallest number first, as vLLM has it; those of one number in order of arrival."""

    def order(self, request: Request, *, arrival: int) -> Order:
        return (request.priority, arrival)


def make_policy(name: PolicyName) -> Policy:
    policies: dict[PolicyName, Policy] = {"fcfs": FirstComeFirstServed(), "priority": ByPriority()}
    return policies[name]
