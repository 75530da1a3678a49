"""Many LLMDeployments whose pod templates change at once: how many roll out at a time, and that all of them do."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from status_views import deployment

from quire_operator.deployment.rollout_slots import RolloutSlots, begins_rollout, is_own_idea, queued, takes_slot
from quire_operator.deployment.store import Store
from quire_operator.kube.objects import Child, Condition, DeploymentState, Key, Owner, Ref, Resource, own_deployment

LATE = Condition(is_true=False, reason="ProgressDeadlineExceeded", message="late")


def state(**changes: Any) -> DeploymentState:
    return deployment(**({"template_digest": "old"} | changes))


@pytest.mark.parametrize(
    ("live", "begins"),
    [
        (state(), True),
        (state(template_digest="new"), False),
        (state(template_digest=""), True),
        (state(template_digest="new", is_held=True), True),
        (state(updated=1), False),
        (state(replicas_asked=0, replicas=0), False),
    ],
    ids=["another template", "the same", "of an older operator", "held", "rolling already", "at zero"],
)
def test_only_template_changes_are_rollouts(live: DeploymentState, begins: bool) -> None:
    assert begins_rollout(live, template_digest="new") is begins


@pytest.mark.parametrize(
    ("live", "takes"),
    [(state(updated=1), True), (state(updated=0, is_held=True), False), (state(updated=1, progressing=LATE), False)],
    ids=["rolling", "held", "stopped at its deadline"],
)
def test_rollouts_in_progress_take_a_slot(live: DeploymentState, takes: bool) -> None:
    assert takes_slot(live) is takes


def test_queued_rollout_names_the_running_rollouts() -> None:
    wait = queued([Key("prod", "b"), Key("prod", "a")], 2)
    assert wait is not None and "prod/a, prod/b" in wait.message and wait.reason == "RolloutQueued"
    assert queued([Key("prod", "a")], 2) is None and queued([Key("prod", "a")] * 9, 0) is None


class Fleet:
    """LLMDeployments whose operator was just upgraded, their Deployments' controller, and the passes over them."""

    def __init__(self, count: int, limit: int) -> None:
        self.store, self.version = Store(), 0
        self.slots = RolloutSlots(self.store, limit=limit)
        self.keys = [Key("prod", f"m{number}") for number in range(count)]
        for key in self.keys:
            self.store.put_resource(
                Resource(
                    key=key,
                    uid=key.name,
                    version="1",
                    generation=1,
                    deleting=False,
                    body={},
                    status={"observedGeneration": 1},
                )
            )
            self.put(key, state())

    def put(self, key: Key, live: DeploymentState) -> None:
        self.version += 1
        self.store.put_child(
            key,
            Child(
                ref=Ref("Deployment", key.name),
                uid=key.name,
                version=str(self.version),
                owner=Owner(kind="LLMDeployment", name=key.name, uid=key.name),
                deleting=False,
                fingerprint="",
                foreign=(),
                deployment=live,
            ),
        )

    def live(self, key: Key) -> DeploymentState:
        resource = self.store.resource(key)
        assert resource is not None
        live = own_deployment(resource, self.store.children(key))
        assert live is not None
        return live

    def run_pass(self, key: Key) -> None:
        """Apply as ``reconcile`` does: paused, or the new template; the controller has not seen it yet."""
        live, resource = self.live(key), self.store.resource(key)
        assert resource is not None
        if begins_rollout(live, template_digest="new"):
            with self.slots.requested(resource, 0.0) as wait:
                is_held = wait is not None
                changed = replace(live, template_digest="new", is_held=is_held, generation=live.generation + 1)
                self.put(key, changed)

    def progress(self, key: Key) -> None:
        """Let the controller see the Deployment, then replace one replica after the other."""
        live = self.live(key)
        if live.observed_generation < live.generation:
            updated = live.updated if live.is_held or live.replicas_asked == 0 else 0
            self.put(key, replace(live, observed_generation=live.generation, updated=updated))
        elif live.is_rolling:
            self.put(key, replace(live, updated=live.updated + 1))

    @property
    def rolling(self) -> int:
        return sum(takes_slot(self.live(key)) for key in self.keys)

    @property
    def is_done(self) -> bool:
        return all(self.live(key).template_digest == "new" and not self.live(key).is_held for key in self.keys)


@given(st.integers(1, 8), st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=60))
def test_rollouts_of_a_fleet_respect_slots_and_finish(count: int, limit: int, steps: list[tuple[bool, int]]) -> None:
    fleet = Fleet(count, limit)
    for is_pass, number in steps:
        key = fleet.keys[number % count]
        (fleet.run_pass if is_pass else fleet.progress)(key)
        assert fleet.rolling <= limit
    for _ in range(6 * count):
        for key in fleet.keys:
            fleet.run_pass(key)
            assert fleet.rolling <= limit
        for key in fleet.keys:
            fleet.progress(key)
    assert fleet.is_done and fleet.rolling == 0


def test_concurrent_reconciles_share_the_slots() -> None:
    fleet = Fleet(2, 1)
    first, second = (fleet.store.resource(key) for key in fleet.keys)
    assert first is not None and second is not None
    with fleet.slots.requested(first, 0.0) as granted, fleet.slots.requested(second, 0.0) as wait:
        assert granted is None and wait is not None
    with fleet.slots.requested(second, 0.0) as granted:
        assert granted is None


def test_changed_spec_in_rollout_keeps_its_slot() -> None:
    fleet = Fleet(3, 1)
    fleet.run_pass(fleet.keys[0])
    second, third = (fleet.store.resource(key) for key in fleet.keys[1:])
    assert second is not None and third is not None
    changed = replace(second, generation=2)
    assert not is_own_idea(changed)
    with fleet.slots.requested(changed, 0.0) as granted, fleet.slots.requested(third, 0.0) as wait:
        assert granted is None and wait is not None and str(second.key) in wait.message


@pytest.mark.parametrize(
    ("observed", "reason", "is_own"),
    [
        (2, "Serving", True),
        (2, "Starting", True),
        (2, "InsufficientGPUMemory", False),
        (2, "InvalidSpec", False),
        (1, "Serving", False),
    ],
)
def test_a_spec_that_was_never_applied_is_the_users_change(observed: int, reason: str, is_own: bool) -> None:
    ready = {"type": "Ready", "observedGeneration": observed, "reason": reason}
    resource = Fleet(1, 1).store.resource(Key("prod", "m0"))
    assert resource is not None
    changed = replace(resource, generation=2, status={"observedGeneration": observed, "conditions": [ready]})
    assert is_own_idea(changed) is is_own
