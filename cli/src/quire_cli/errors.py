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


class FileProblem(UserError): ...


class SpecProblem(UserError): ...


class ModelProblem(UserError): ...


class CapacityProblem(UserError): ...


class SimulationProblem(UserError): ...


class AddressProblem(UserError): ...


class AlreadyRunning(UserError): ...


class StartProblem(UserError):
    exit_code = 1


class InspectionProblem(UserError):
    exit_code = 1
