"""The clock of a simulation: arrivals, ticks and faults in their order."""

from collections.abc import Sequence

from quire_operator.simulation.run import Run
from quire_operator.simulation.scaler import Scaler
from quire_operator.simulation.scenario import Request, Scenario


def simulate(requests: Sequence[Request], scenario: Scenario, scaler: Scaler) -> Run:
    """What happens to these requests; they may come in any order."""
    raise NotImplementedError
