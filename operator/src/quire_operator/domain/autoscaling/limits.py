"""Stabilization windows and step limits: how far and how fast replicas may change.

Part of ``autoscaler.decide``; pure arithmetic over earlier needs and moves.
"""

import math
from collections.abc import Callable, Sequence

from quire_operator.domain.autoscaling.history import Move, Need
from quire_operator.domain.resource.scaling import Autoscaling
from quire_operator.domain.resource.scaling_limits import PolicyType, ScaleDown, ScaleUp, SelectPolicy, StepPolicy

_EPSILON = 1e-9


def whole(need: float) -> int:
    """Return the whole number of replicas for a need; a rounding error adds none."""
    return math.ceil(need - _EPSILON)


def kept_needs(needs: Sequence[Need], *, rules: Autoscaling, now: float) -> tuple[Need, ...]:
    """Return the needs in the longer window, and the last one before it, which shows that the window is complete."""
    start = now - max(rules.scale_up.window_seconds, rules.scale_down.window_seconds)
    inside = [need for need in needs if need.time > start]
    before = [need for need in needs if need.time <= start]
    return (*before[-1:], *inside)


def kept_moves(moves: Sequence[Move], *, rules: Autoscaling, now: float) -> tuple[Move, ...]:
    """Return the moves that a step limit still counts."""
    period = max(rules.scale_up.longest_period_seconds, rules.scale_down.longest_period_seconds)
    return tuple(move for move in moves if move.time > now - period)


def steady_need_up(needs: Sequence[Need], *, rules: ScaleUp, now: float) -> float:
    """Return the need during the whole window."""
    return min(need.up for need in needs if need.time >= now - rules.window_seconds)


def highest_need(needs: Sequence[Need], key: Callable[[Need], float], *, rules: ScaleDown, now: float) -> Need:
    """Return the need within the window whose number of replicas, which ``key`` returns, is the largest."""
    return max((need for need in needs if need.time >= now - rules.window_seconds), key=key)


def is_watched(needs: Sequence[Need], *, rules: ScaleDown, now: float) -> bool:
    """Return True if demand is known for the whole window."""
    return bool(needs) and needs[0].time <= now - rules.window_seconds


def most_allowed(current: int, moves: Sequence[Move], *, rules: ScaleUp, now: float) -> int:
    """Return the most replicas that the step limits allow now."""
    if rules.select is SelectPolicy.DISABLED:
        return current
    choose = max if rules.select is SelectPolicy.MAX else min
    return max(current, choose(_raised(current, moves, policy, now) for policy in rules.policies))


def fewest_allowed(current: int, moves: Sequence[Move], *, rules: ScaleDown, now: float) -> int:
    """Return the fewest replicas that the step limits allow now."""
    if rules.select is SelectPolicy.DISABLED:
        return current
    choose = min if rules.select is SelectPolicy.MAX else max
    return min(current, max(0, choose(_lowered(current, moves, policy, now) for policy in rules.policies)))


def _raised(current: int, moves: Sequence[Move], policy: StepPolicy, now: float) -> int:
    recent = (move for move in moves if move.time > now - policy.period_seconds)
    start = max(0, current - sum(max(0, move.to_replicas - move.from_replicas) for move in recent))
    return start + (policy.value if policy.type is PolicyType.PODS else math.ceil(start * policy.value / 100))


def _lowered(current: int, moves: Sequence[Move], policy: StepPolicy, now: float) -> int:
    recent = (move for move in moves if move.time > now - policy.period_seconds)
    start = current + sum(max(0, move.from_replicas - move.to_replicas) for move in recent)
    # As an HPA rounds: the replicas that remain, down.
    return start - policy.value if policy.type is PolicyType.PODS else start * max(0, 100 - policy.value) // 100
