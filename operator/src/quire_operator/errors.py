"""What a person can do wrong with the quire command, and what it then says.

    UserError                  printed as it is, without a traceback; exit code 2
    ├── FileProblem            the YAML file: missing, unreadable, not YAML, empty
    ├── SpecProblem            a document in it: every reason at once
    ├── ModelProblem           the model: no such folder or repository, no way to the hub, not a model
    ├── CapacityProblem        it does not fit this machine
    ├── SimulationProblem      quire simulate: nothing to simulate, or nothing says how fast an engine is
    ├── AddressProblem         the port is taken
    ├── AlreadyRunning         another quire up runs this file
    ├── StartProblem           an engine or the gateway ended before it was ready
    ├── InspectionProblem      quire explain, quire top: no such run or LLMDeployment, or no right to see it
    └── ClusterProblem         no way to a cluster, or one that can't be worked with

Anything else that is raised is our bug.
"""

from collections.abc import Sequence


class UserError(Exception):
    """The root: one line that says what was wrong and where, details below it, and what would be right."""

    exit_code = 2

    def __init__(self, message: str, *, details: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details = tuple(details)
        self.hint = hint


class FileProblem(UserError):
    """The file can't be read as YAML documents."""


class SpecProblem(UserError):
    """A document is no valid LLMDeployment, or no set of them."""


class ModelProblem(UserError):
    """The model can't be had, or is none."""


class CapacityProblem(UserError):
    """The model with this spec does not fit."""


class SimulationProblem(UserError):
    """What is to be simulated can't be."""


class AddressProblem(UserError):
    """The address can't be listened on."""


class AlreadyRunning(UserError):
    """The same file is up already."""


class StartProblem(UserError):
    """Something ended before it was ready."""

    exit_code = 1


class InspectionProblem(UserError):
    """What is to be looked at is not there, or not to be seen."""

    exit_code = 1


class ClusterProblem(UserError):
    """There is no way to a cluster, or the one there is can't be worked with."""

    exit_code = 1
