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
