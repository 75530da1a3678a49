"""Errors of users of the quire command, with the messages that it prints.

    UserError                  printed as it is, without a traceback; exit code 2
    ├── FileProblem            the YAML file: missing, unreadable, not YAML, empty
    ├── SpecProblem            a document in it: every problem at once
    ├── ModelProblem           the model: no such folder or repository, no connection to the hub, not a model
    ├── CapacityProblem        it does not fit this machine
    ├── SimulationProblem      quire simulate: nothing to simulate, or no figures for the engine's speed
    ├── AddressProblem         the port is in use
    ├── AlreadyRunning         another quire up runs this file
    ├── StartProblem           a command is not installed, or an engine or the gateway ended before it was ready
    └── InspectionProblem      quire explain, quire top: no such run or LLMDeployment, or no permission to read it

Every other exception is a bug.
"""

from quire_operator.errors import UserError


class FileProblem(UserError):
    """A file that cannot be read as YAML documents."""


class SpecProblem(UserError):
    """A document that is not a valid LLMDeployment, or documents that conflict."""


class ModelProblem(UserError):
    """A model that is unavailable or invalid."""


class CapacityProblem(UserError):
    """A model that does not fit with this spec."""


class SimulationProblem(UserError):
    """A simulation that cannot run."""


class AddressProblem(UserError):
    """An address that cannot be listened on."""


class AlreadyRunning(UserError):
    """A file that another quire up already runs."""


class StartProblem(UserError):
    """A process that ended before it was ready."""

    exit_code = 1


class InspectionProblem(UserError):
    """A run or resource that does not exist or may not be read."""

    exit_code = 1
