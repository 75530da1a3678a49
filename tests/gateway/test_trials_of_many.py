"""Poisonous requests among harmless ones: many gateways and replicas, simulated around the real decisions."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_gateway.trials import Losses, Place, Step, Trials, avoid


@dataclass
class Request:
    """A request with its part of the gateway's state."""

    number: int
    poisonous: bool
    has_tokens: bool = False
    """True for a stream that another replica can continue."""
    losses: Losses = field(default_factory=Losses)
    answer: str | None = None
    killed: int = 0
    hit_by: set[int] = field(default_factory=set)
    """The poisonous requests that it was lost with."""


@dataclass
class Replica:
    """An engine: its requests by gateway, and its lock for trials."""

    name: str
    up: bool = True
    running: list[tuple["Gateway", Request]] = field(default_factory=list)
    trials: dict[int, bool] = field(default_factory=dict)
    """The trials by number; True for one that may run together with others."""


class Gateway:
    """The shell around ``Trials`` without its waiting."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.trials = Trials()
        self.requests: dict[int, Request] = {}

    def in_flight(self, replica: Replica) -> int:
        return sum(gateway is self for gateway, _ in replica.running)

    def send(self, request: Request, choice: int) -> None:
        """Send a request that was never lost; ``choice`` stands for the load."""
        self.requests[request.number] = request
        ready = [replica for replica in self.replicas if replica.up]
        if not ready:
            request.answer = "held"
            return
        avoided = avoid(self.trials.places, [replica.name for replica in ready])
        open_ = [replica for replica in ready if replica.name not in avoided]
        open_[choice % len(open_)].running.append((self, request))

    def try_lost(self) -> bool:
        """Start one trial; return whether one started. A replica refuses one next to another gateway's."""
        found = [Place(r.name, self.in_flight(r), room=9) for r in self.replicas if r.up]
        started = self.trials.start(found)
        if started is None:
            return False
        self.trials, number, name = started
        replica = next(each for each in self.replicas if each.name == name)
        together = number in self.trials.resuming.get(name, ())
        if replica.trials and not (together and all(replica.trials.values())):
            self.trials = self.trials.put_back(number, together=together)
            return False
        replica.trials[number] = together
        replica.running.append((self, self.requests[number]))
        return True

    def finish(self, request: Request, replica: Replica) -> None:
        request.answer = "200"
        self.trials = self.trials.end(request.number)
        replica.trials.pop(request.number, None)

    def lose(self, request: Request) -> None:
        request.losses, step = request.losses.after("engine_stopped", terminating=False, has_tokens=request.has_tokens)
        if step is Step.FAIL:
            request.answer = "502"
            self.trials = self.trials.leave(request.number)
        else:
            self.trials = self.trials.leave(request.number).enter(request.number, together=step is Step.RESUME)


def die(replica: Replica, killer: Request) -> None:
    killer.killed += 1
    lost, replica.running, replica.trials, replica.up = replica.running, [], {}, False
    for gateway, request in lost:
        request.hit_by.add(killer.number)
        gateway.lose(request)


REQUESTS = {"harmless": False, "stream": False, "poisonous": True, "poisonous stream": True}
"""The kinds of requests, and whether they are poisonous."""
EVENTS = st.sampled_from([*REQUESTS, "harmless", "stream", "stream", "finish", "die", "restart", "try", "try"])


def play(events: list[tuple[str, int]], num_replicas: int, num_gateways: int, num_poisonous: int) -> list[Request]:
    replicas = [Replica(f"r{number}") for number in range(num_replicas)]
    gateways = [Gateway(replicas) for _ in range(num_gateways)]
    requests: list[Request] = []
    for event, choice in events:
        replica = replicas[choice % num_replicas]
        poisonous = REQUESTS.get(event)
        if poisonous is False or (poisonous and sum(r.poisonous for r in requests) < num_poisonous):
            requests.append(Request(len(requests), poisonous, has_tokens=event.endswith("stream")))
            gateways[choice % num_gateways].send(requests[-1], choice)
        step(event, choice, replica, gateways)
    # The end: engines restart, and everything that runs ends. Each round answers or loses at least one request.
    for _ in range(12 * len(requests) + 8):
        for replica in replicas:
            replica.up = True
            while replica.running:
                before = len(replica.running)
                step("die", 0, replica, gateways)
                if len(replica.running) == before:
                    step("finish", 0, replica, gateways)
        for number in range(num_gateways):
            step("try", number, replicas[0], gateways)
    return [request for request in requests if request.answer != "held"]


def step(event: str, choice: int, replica: Replica, gateways: list[Gateway]) -> None:
    if event == "finish" and (harmless := [each for each in replica.running if not each[1].poisonous]):
        gateway, request = harmless[choice % len(harmless)]
        replica.running.remove((gateway, request))
        gateway.finish(request, replica)
    elif event == "die" and (killers := [request for _, request in replica.running if request.poisonous]):
        die(replica, killers[choice % len(killers)])
    elif event == "restart":
        replica.up = True
    elif event == "try":
        gateways[choice % len(gateways)].try_lost()


PLAYS = st.lists(st.tuples(EVENTS, st.integers(0, 1000)), max_size=80)


@settings(max_examples=300)
@given(PLAYS, st.integers(1, 4), st.integers(1, 3))
def test_one_poisonous_request_fails_alone(events: list[tuple[str, int]], num_replicas: int, num_gateways: int) -> None:
    requests = play(events, num_replicas, num_gateways, num_poisonous=1)
    for request in requests:
        assert request.answer == ("502" if request.poisonous else "200")
        assert request.killed <= 2 + request.has_tokens


@settings(max_examples=300)
@given(PLAYS, st.integers(1, 4), st.integers(1, 3))
def test_many_poisonous_requests_end_few_engines_each(
    events: list[tuple[str, int]], num_replicas: int, num_gateways: int
) -> None:
    """A harmless request fails only if two poisonous ones hit it."""
    requests = play(events, num_replicas, num_gateways, num_poisonous=20)
    for request in requests:
        assert request.killed <= 2 + request.has_tokens
        assert request.answer == ("502" if request.poisonous else "200") or len(request.hit_by) > 1
