"""The part of ``quire explain`` about a canary: both tracks, gate by gate. Pure.

``explain_view`` shows it; the figures are those of ``status.rollout``, which the operator writes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

JSON = Mapping[str, Any]

_STYLES = {"Passed": "green", "Failed": "bold red", "Waiting": "yellow", "NoData": "dim"}


def canary_of(status: Mapping[str, object]) -> JSON | None:
    """Return ``status.rollout`` if it has something to show: a canary, or how the last one ended."""
    found = status.get("rollout")
    if not isinstance(found, Mapping):
        return None
    return found if found.get("phase") != "Stable" or found.get("message") else None


def render_canary(canary: JSON) -> RenderableType:
    """Return the state of the canary and the verdict of each gate."""
    parts: list[RenderableType] = [_state(canary)]
    gates = [gate for gate in canary.get("gates", ()) if isinstance(gate, Mapping)]
    if gates:
        parts += [Text(), _gates(gates)]
    return Group(*parts)


def _state(canary: JSON) -> Text:
    weight = f", {canary.get('weightPercent', 0)} % of the requests" if canary.get("canaryRevision") else ""
    tried = f" {canary['canaryRevision']}" if canary.get("canaryRevision") else ""
    against = f"Canary{tried} against stable {canary.get('stableRevision', '?')}{weight}"
    return Text.assemble((f"{canary.get('phase')}", "bold"), f"  {against}: {canary.get('message', '')}")


def _gates(gates: Sequence[JSON]) -> Table:
    table = Table(title="Gates", title_justify="left", title_style="bold", expand=False)
    for name in ("Gate", "Stable", "Canary", "Verdict"):
        table.add_column(name, no_wrap=name != "Verdict")
    for gate in gates:
        verdict = str(gate.get("verdict"))
        why = Text.assemble((verdict, _STYLES.get(verdict, "")), f"  {gate.get('message', '')}")
        table.add_row(_name(gate), _figures(gate, "stable"), _figures(gate, "canary"), why)
    return table


def _name(gate: JSON) -> str:
    return f"{gate.get('metric')} p{gate['percentile']}" if "percentile" in gate else str(gate.get("metric"))


def _figures(place: JSON, track: str) -> str:
    found = place.get(track)
    if not isinstance(found, Mapping):
        return "–"
    count = found.get("count", 0)
    if "errors" in found:
        share = f" ({100 * found['errors'] / count:.2f} %)" if count else ""
        return f"{found['errors']} of {count}{share}"
    if "percentileMicroseconds" not in found:
        return f"{count} requests"
    return f"{_ms(found['percentileMicroseconds'])} (median {_ms(found.get('p50Microseconds', 0))}, {count} requests)"


def _ms(microseconds: int) -> str:
    return f"{microseconds / 1000:.3g} ms" if microseconds < 1_000_000 else f"{microseconds / 1_000_000:.3g} s"
