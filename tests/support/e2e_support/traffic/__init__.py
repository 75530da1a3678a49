"""Continuous traffic with known answers, which are all checked.

Scenarios use `driver.Traffic`; `prompts` contains the requests and the correct answers.
"""

from e2e_support.traffic.answer import Form
from e2e_support.traffic.client import Patience
from e2e_support.traffic.driver import Live, Traffic
from e2e_support.traffic.prompts import Kind, Prompt, of_kind
from e2e_support.traffic.result import CUT, FailureKind, Mark, Permit, Record, TrafficFailed, TrafficResult

__all__ = [
    "CUT",
    "FailureKind",
    "Form",
    "Kind",
    "Live",
    "Mark",
    "Patience",
    "Permit",
    "Prompt",
    "Record",
    "Traffic",
    "TrafficFailed",
    "TrafficResult",
    "of_kind",
]
