"""The bodies of requests whose replicas died: when they are refused, and how many engines one of them can end."""

from quire_gateway.quarantine import FIRST_SECONDS, FORGET_SECONDS, NEXT_SECONDS, Quarantine, digest_of

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
