"""Repeated changes of other clients are reverted less and less often, and the client is named."""

from dataclasses import replace
from typing import Any

from quire_operator.deployment.repairs import STATUS, RepairLog
from quire_operator.kube.objects import Ref
from quire_operator.kube.ownership import ForeignField

DEPLOYMENT = Ref("Deployment", "chat")
HOUR = 3600
HPA = "spec.replicas (set by hpa)"


def test_repairs_of_contested_fields_back_off_without_end() -> None:
    log, repaired = RepairLog(), []
    for now in range(HOUR):
        if not log.wait_seconds(DEPLOYMENT, HPA, now):
            log.note(DEPLOYMENT, HPA, now)
            repaired.append(now)
    pauses = [later - earlier for earlier, later in zip(repaired, repaired[1:], strict=False)]
    assert pauses[:2] == [1, 1] and pauses[2:] == sorted(pauses[2:]) and max(pauses) == 600
    assert len(repaired) <= 16
    assert log.contests(HOUR) == f"Deployment chat is repeatedly changed by another client and reverted: {HPA}"


def test_one_or_two_changes_count_as_manual_edits() -> None:
    log = RepairLog()
    for now in (0, 10):
        log.note(DEPLOYMENT, "it", now)
    assert log.contests(10) == "" and log.wait_seconds(DEPLOYMENT, "it", 10) == 0
    log.note(DEPLOYMENT, "it", 20)
    assert log.contests(20) and log.wait_seconds(DEPLOYMENT, "it", 20) == 2
    assert not log.contests(20 + HOUR) and log.wait_seconds(DEPLOYMENT, "it", 20 + HOUR) == 0


def test_changes_of_different_fields_are_no_contest() -> None:
    log = RepairLog()
    for now in range(9):
        log.note(DEPLOYMENT, f"field {now}", now)
    assert log.contests(9) == "" and log.wait_seconds(DEPLOYMENT, "field 8", 9) == 0


def test_repairs_are_counted_per_object() -> None:
    log = RepairLog()
    for now in range(3):
        log.note(STATUS, "", now)
    assert log.wait_seconds(DEPLOYMENT, "", 3) == 0
    assert log.contests(3).startswith(
        "its status is repeatedly changed by another client and reverted: another process writes"
    )


def test_clock_set_back_does_not_extend_a_wait() -> None:
    log = RepairLog()
    for now in range(HOUR, HOUR + 9):
        log.note(DEPLOYMENT, "it", now)
    assert log.wait_seconds(DEPLOYMENT, "it", 0) == 0


async def test_second_operator_is_detected_and_causes_no_fight(world: Any) -> None:
    world.apply(replicas=1)
    await world.settle()
    writes = 0
    for _ in range(20):  # each time after the other client has applied its own
        child = world.cluster.children[DEPLOYMENT]
        version, theirs = world.cluster._next(), world.cluster._next()
        world.cluster.children[DEPLOYMENT] = replace(child, version=version, fingerprint=theirs)
        writes += sum("Deployment" in what for what in await world.settle(passes=1))
        world.clock.time += 1
    assert writes <= 7
    assert world.condition("Degraded") == "True FieldsContested"
    assert "another process writes as field manager quire" in world.message("Degraded")


async def test_contested_status_is_written_with_backoff(world: Any) -> None:
    world.apply(replicas=1)
    await world.settle()
    writes = 0
    for number in range(20):
        key, resource = next(iter(world.cluster.resources.items()))
        theirs = {**resource.status, "endpoint": f"http://{number}"}
        world.cluster.resources[key] = replace(resource, version=world.cluster._next(), status=theirs)
        writes += (await world.settle(passes=1)).count("status")
        world.clock.time += 1
    assert writes <= 9, "and one more each that says so"
    world.clock.time += HOUR
    await world.settle()
    assert world.status["endpoint"].endswith("/v1"), "in the end it is right"


async def test_recurring_addition_is_removed_with_backoff(world: Any) -> None:
    world.apply(replicas=1)
    await world.settle()
    host_network = ForeignField(path=("f:spec", "f:template", "f:spec", "f:hostNetwork"), manager="injector")
    removals = 0
    for _ in range(20):
        child = world.cluster.children[DEPLOYMENT]
        version = world.cluster._next()
        world.cluster.children[DEPLOYMENT] = replace(child, version=version, foreign=(host_network,))
        removals += (await world.settle(passes=1)).count("remove-fields Deployment chat")
        world.clock.time += 1
    assert 3 <= removals <= 7
    assert world.message("Degraded").endswith("spec.template.spec.hostNetwork (set by injector)")


async def test_child_that_is_deleted_repeatedly_is_recreated_more_slowly(world: Any) -> None:
    world.apply(replicas=1)
    await world.settle()
    made = 0
    for _ in range(20):
        world.cluster.children.pop(Ref("Service", "chat"), None)
        made += (await world.settle(passes=1)).count("create Service chat")
        world.clock.time += 1
    assert 3 <= made <= 7
    assert "another client deletes it" in world.message("Degraded")
