"""The bodies of requests whose replicas died: when they are refused, and how many engines one of them can end."""

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.quarantine import FIRST_SECONDS, FORGET_SECONDS, MAX_DEATHS, NEXT_SECONDS, Quarantine, digest_of

BODY = digest_of("/v1/completions", b"{}")


def died(*deaths: tuple[str, float]) -> Quarantine:
    """Return a quarantine after the deaths of these replicas at these times, each a second after it got the body."""
    quarantine = Quarantine()
    for replica, at in deaths:
        quarantine.record_death(BODY, replica, sent=at - 1, now=at)
    return quarantine


def test_digest_is_of_the_path_and_the_whole_body() -> None:
    others = [digest_of("/v1/completions", b"{} "), digest_of("/v1/completions{", b"}"), digest_of("/v1/chat", b"{}")]
    assert digest_of("/v1/completions", bytearray(b"{}")) == BODY
    assert len({BODY, *others}) == 4
    digest_of("/\udcff", b"")


def test_second_death_quarantines_for_a_minute_and_the_third_for_ten() -> None:
    assert died(("a", 10)).admit(BODY, 10) == 0
    quarantine = died(("a", 10), ("b", 20))
    assert quarantine.admit(BODY, 20) == FIRST_SECONDS
    assert quarantine.admit(digest_of("/", b""), 20) == 0
    assert quarantine.admit(BODY, 20 + FIRST_SECONDS) == 0
    assert quarantine.record_death(BODY, "a", sent=80, now=85)
    assert quarantine.admit(BODY, 85) == NEXT_SECONDS


def test_one_request_at_a_time_is_admitted_after_a_quarantine() -> None:
    quarantine = died(("a", 10), ("b", 20))
    assert [quarantine.admit(BODY, 80 + second) > 0 for second in range(3)] == [False, True, True]
    # Its client may have left.
    assert quarantine.admit(BODY, 80 + FIRST_SECONDS) == 0


def test_requests_with_one_body_that_die_together_meet_one_death() -> None:
    quarantine = Quarantine()
    assert not any(quarantine.record_death(BODY, "a", sent=sent, now=10 + sent / 10) for sent in range(3))
    assert not quarantine.admit(BODY, 10.3)
    assert quarantine.record_death(BODY, "a", sent=11, now=12)


def test_complete_answer_shows_that_a_body_is_harmless() -> None:
    quarantine = died(("a", 10))
    quarantine.record_answer(BODY)
    assert not quarantine.record_death(BODY, "b", sent=11, now=12)


def test_deaths_are_forgotten() -> None:
    assert died(("a", 10), ("b", 10 + FORGET_SECONDS)).admit(BODY, 10 + FORGET_SECONDS) == 0
    quarantine = died(("a", 10), ("b", 11))
    assert quarantine.admit(BODY, 11 + FORGET_SECONDS) == 0
    assert not quarantine.record_death(BODY, "a", sent=2000, now=2001)


def test_number_of_bodies_is_bounded() -> None:
    quarantine = died(("a", 1), ("b", 2))
    for number in range(5000):
        quarantine.record_death(digest_of("/", b"%d" % number), "a", sent=3, now=4)
    assert len(quarantine._records) == 4096 and quarantine.admit(BODY, 5) == 0


@dataclass
class Request:
    """A request at one gateway; a poisonous one has the body that its client repeats."""

    gateway: int
    digest: bytes
    poisonous: bool
    answer: str = ""
    sends: int = 0
    deaths: int = 0
    sent: float = 0.0


@dataclass
class Fleet:
    """Replicas that requests kill, behind gateways that know nothing of one another."""

    num_replicas: int
    num_gateways: int
    now: float = 0.0
    quarantines: list[Quarantine] = field(init=False)
    running: dict[int, list[Request]] = field(default_factory=lambda: defaultdict(list))
    requests: list[Request] = field(default_factory=list)
    kills: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """The times at which the poisonous body of each gateway killed an engine."""

    def __post_init__(self) -> None:
        self.quarantines = [Quarantine() for _ in range(self.num_gateways)]

    def arrive(self, gateway: int, choice: int, *, poisonous: bool) -> None:
        """Send a new request; the client of the poisonous body has one at a time at each gateway."""
        if poisonous and any(r.poisonous and not r.answer and r.gateway == gateway for r in self.requests):
            return
        body = b"poison" if poisonous else b"%d" % len(self.requests)
        request = Request(gateway, digest_of("/", body), poisonous)
        self.requests.append(request)
        if self.quarantines[gateway].admit(request.digest, self.now):
            request.answer = "refused"
        else:
            self.send(request, choice)

    def send(self, request: Request, choice: int) -> None:
        request.sends, request.sent = request.sends + 1, self.now
        self.running[choice % self.num_replicas].append(request)

    def die(self, replica: int, choice: int) -> None:
        """End an engine: by the poisonous requests on it, or by chance."""
        lost, self.running[replica] = self.running[replica], []
        for gateway in {request.gateway for request in lost if request.poisonous}:
            self.kills[gateway].append(self.now)
        for number, request in enumerate(lost):
            request.deaths += 1
            is_refused = self.quarantines[request.gateway].record_death(
                request.digest, str(replica), sent=request.sent, now=self.now
            )
            if is_refused or request.deaths >= MAX_DEATHS:
                request.answer = "502"
            else:
                self.send(request, choice + number)

    def finish(self, replica: int) -> None:
        """Answer the harmless requests of a replica."""
        for request in [each for each in self.running[replica] if not each.poisonous]:
            self.running[replica].remove(request)
            self.quarantines[request.gateway].record_answer(request.digest)
            request.answer = "200"


EVENTS = st.sampled_from(["harmless", "harmless", "poisonous", "poisonous", "die", "die", "finish", "wait"])
PLAYS = st.lists(st.tuples(EVENTS, st.integers(0, 1000), st.floats(0.001, 200)), max_size=80)


@given(PLAYS, st.integers(1, 5), st.integers(1, 3))
def test_poisonous_body_ends_few_engines_whatever_its_client_repeats(
    events: list[tuple[str, int, float]], num_replicas: int, num_gateways: int
) -> None:
    """A harmless request fails only if it met two deaths, and no request is sent more than twice."""
    fleet = Fleet(num_replicas, num_gateways)
    for event, choice, seconds in events:
        fleet.now += seconds if event == "wait" else 0.001
        if event == "die":
            fleet.die(choice % num_replicas, choice)
        elif event == "finish":
            fleet.finish(choice % num_replicas)
        elif event != "wait":
            fleet.arrive(choice % num_gateways, choice, poisonous=event == "poisonous")
    for _ in range(2):
        for replica in range(num_replicas):
            fleet.now += 0.001
            fleet.finish(replica)
            fleet.die(replica, 0)
    for replica in range(num_replicas):
        fleet.finish(replica)

    for kills in fleet.kills.values():
        for start in kills:
            assert sum(start <= kill < start + FIRST_SECONDS for kill in kills) <= MAX_DEATHS
            assert sum(start <= kill < start + NEXT_SECONDS for kill in kills) <= MAX_DEATHS + 1
    for request in fleet.requests:
        assert request.sends <= MAX_DEATHS
        assert request.poisonous or request.answer == ("200" if request.deaths < MAX_DEATHS else "502")
