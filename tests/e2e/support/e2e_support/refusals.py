"""What ServiceAccounts asked an API server for, and what they were refused, from its audit log. Pure but for the file.

Reads hundreds of megabytes in seconds: only lines that name the accounts are parsed.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

_ACCOUNT: Final = "system:serviceaccount:"
_DONE: Final = b'"stage":"ResponseComplete"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """From when the API server was killed to when it said that it is ready.

    One that has just begun answers before it is ready, and refuses everybody until it has read its rules.
    """

    begun: datetime
    ended: datetime

    def __contains__(self, moment: datetime) -> bool:
        return self.begun <= moment <= self.ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """By the ServiceAccounts that were looked for."""

    verbs: Counter[str]
    """Such as `patch llmdeployments/status`."""
    refused: tuple[str, ...]
    """What they had no right to, in the words of a server that knew its rules."""


def asked_by(log: Path, accounts: str, *, since: datetime, outages: Sequence[Outage] = ()) -> Asked:
    """Requests received since then. `accounts` is how they begin: `namespace:name`, or less of it."""
    with log.open("rb") as lines:
        return read(lines, accounts, since=since, outages=outages)


def read(lines: Iterable[bytes], accounts: str, *, since: datetime, outages: Sequence[Outage] = ()) -> Asked:
    """``lines`` of the log, each an answered request or something else."""
    verbs: Counter[str] = Counter()
    refused: list[str] = []
    for entry in _of(lines, f"{_ACCOUNT}{accounts}"):
        received = datetime.fromisoformat(entry["requestReceivedTimestamp"])
        if received < since:
            continue
        target = entry.get("objectRef", {})
        resource = "/".join(part for part in (target.get("resource"), target.get("subresource")) if part)
        verbs[f"{entry['verb']} {resource}"] += 1
        is_forbidden = entry.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid"
        if is_forbidden and not any(received in outage for outage in outages):
            refused.append(
                f"{entry['user']['username']}: {entry.get('responseStatus', {}).get('message', entry['verb'])}"
            )
    return Asked(verbs=verbs, refused=tuple(refused))


def _of(lines: Iterable[bytes], prefix: str) -> Iterator[dict[str, Any]]:
    named = prefix.encode()
    for line in lines:
        if named in line and _DONE in line and line.endswith(b"\n"):  # the last one may be half written
            entry = json.loads(line)
            if entry["user"]["username"].startswith(prefix):
                yield entry
