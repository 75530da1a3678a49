"""The ``status`` of an LLMAdapter, and the Events for its changes: pure.

``Ready`` is true while every replica that is ready answers requests for the adapter, possibly after loading it.
``Loaded`` is true while every one of them has it in host memory or in a slot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from quire_common.contract.adapters_file import AdapterReport, AdapterState
from quire_operator.api.fields import clock_time, items_of
from quire_operator.deployment.conditions import READY, ConditionState, merged
from quire_operator.deployment.served_names import status_section
from quire_operator.deployment.status import Event
from quire_operator.lora.placement import Listing

LOADED = "Loaded"
_HERE = (AdapterState.READY, AdapterState.LOADED)
_MAX_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """The report of one ready replica about one adapter."""

    replica: str
    answered: bool
    """False if the replica gives no report of adapters."""
    adapter: AdapterReport | None = None
    """None if the replica does not know the adapter, or knows only an earlier version of it."""

    @property
    def state(self) -> AdapterState | None:
        return None if self.adapter is None else self.adapter.state


def adapter_status(
    listing: Listing, replicas: Sequence[ReplicaReport], *, desired_replicas: int | None, now: float
) -> dict[str, object]:
    """Return the whole status. ``desired_replicas`` is what the LLMDeployment asks for, if that is known."""
    resource = listing.resource
    conditions = (_ready(listing, replicas, desired_replicas), _loaded(listing, replicas))
    result: dict[str, object] = {
        "observedGeneration": resource.generation,
        "servedName": status_section(listing.claim),
        "replicas": len(replicas),
        "loadedReplicas": sum(each.state in _HERE for each in replicas),
        "conditions": merged(
            items_of(resource.status, "conditions"), conditions, generation=resource.generation, now=clock_time(now)
        ),
    }
    known = [each.adapter for each in replicas if each.adapter is not None and each.state in _HERE]
    revisions = sorted({adapter.revision for adapter in known if adapter.revision is not None})
    if revisions:
        result["revision"] = ", ".join(revisions[:_MAX_SHOWN])
    ranks = [adapter.rank for adapter in known if adapter.rank is not None]
    if ranks:
        result["rank"] = max(ranks)
    return result


def adapter_events(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[Event, ...]:
    """Return an Event if the condition Ready changed, except for the beginning."""
    old, new = _condition(before, READY), _condition(after, READY)
    same = (old.get("status"), old.get("reason")) == (new["status"], new["reason"])
    if same or (new["reason"] in _BEGINNINGS and old.get("status") != "True"):
        return ()
    warning = new["status"] != "True" and new["reason"] not in _BEGINNINGS
    return (Event(warning=warning, reason=str(new["reason"]), message=str(new["message"])),)


_NO_REPLICA, _LOADING = "NoReplica", "Loading"
_BEGINNINGS = (_NO_REPLICA, _LOADING)


def _ready(listing: Listing, replicas: Sequence[ReplicaReport], desired_replicas: int | None) -> ConditionState:
    state = partial(ConditionState, READY)
    if listing.refusal is not None:
        return state(False, listing.refusal.value, listing.message)
    failed = _failure(replicas)
    if failed is not None:
        return state(False, *failed)
    if not replicas and desired_replicas == 0:
        return state(True, "ScaledToZero", "the LLMDeployment has no replicas; the next one that starts serves it")
    if not replicas:
        return state(False, _NO_REPLICA, "no replica is ready; each one loads the adapter when it has started")
    able = [each for each in replicas if each.state in (*_HERE, AdapterState.KNOWN)]
    if len(able) < len(replicas):
        return state(False, _LOADING, f"{len(able)} of {len(replicas)} replicas serve it; {_waiting(replicas)}")
    on_demand = sum(each.state is AdapterState.KNOWN for each in replicas)
    later = f"; {on_demand} load it at the first request" if on_demand else ""
    return state(True, "Serving", f"{len(replicas)} of {len(replicas)} replicas serve it{later}")


def _loaded(listing: Listing, replicas: Sequence[ReplicaReport]) -> ConditionState:
    state = partial(ConditionState, LOADED)
    if listing.entry is None and listing.refusal is not None:
        return state(False, listing.refusal.value, listing.message)
    failed = _failure(replicas)
    if failed is not None:
        return state(False, *failed)
    if not replicas:
        return state(False, _NO_REPLICA, "no replica is ready")
    here = sum(each.state in _HERE for each in replicas)
    counts = f"{here} of {len(replicas)} replicas have loaded it"
    if here == len(replicas):
        return state(True, "Loaded", counts)
    if all(each.state in (*_HERE, AdapterState.KNOWN) for each in replicas):
        return state(False, "OnDemand", f"{counts}; the others load it at their first request for it")
    return state(False, _LOADING, f"{counts}; {_waiting(replicas)}")


def _failure(replicas: Sequence[ReplicaReport]) -> tuple[str, str] | None:
    """Return the reason of the first replica that cannot serve the adapter, and a message that counts all of them."""
    failed = [each for each in replicas if each.state is AdapterState.FAILED]
    if not failed:
        return None
    first = failed[0].adapter
    assert first is not None
    reason = "LoadFailed" if first.reason is None else first.reason.value
    count = f"{len(failed)} of {len(replicas)} replicas cannot serve it"
    return reason, f"{count}; {failed[0].replica}: {first.message or reason}"


def _waiting(replicas: Sequence[ReplicaReport]) -> str:
    """Return what the replicas that do not serve it wait for."""
    silent = [each.replica for each in replicas if not each.answered]
    if silent:
        shown = ", ".join(silent[:_MAX_SHOWN]) + (" and others" if len(silent) > _MAX_SHOWN else "")
        return f"no report of adapters from {shown}: the image of the engine may be older than LLMAdapters"
    if any(each.state is AdapterState.DOWNLOADING for each in replicas):
        return "the others download it"
    return "the others have not read the new list of adapters yet"


def _condition(status: Mapping[str, object], kind: str) -> Mapping[str, object]:
    return next((each for each in items_of(status, "conditions") if each.get("type") == kind), {})
