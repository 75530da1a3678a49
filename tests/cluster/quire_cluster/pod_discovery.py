"""A companion process of Prometheus that watches pods and writes the file of scrape targets (`prometheus.targets`).

While the API server does not answer, the file stays unchanged, as with Prometheus's own discovery.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from quire_cluster.certificates import KeyPair
from quire_cluster.client import ApiClient
from quire_cluster.kubeconfig import Server
from quire_cluster.prometheus import targets

TREE: Final = Path(__file__).parents[1]
PODS: Final = "/api/v1/pods"
WATCH_SECONDS: Final = 300
RETRY_SECONDS: Final = 1.0

Pods = dict[str, Mapping[str, Any]]


class WatchEnded(Exception):
    """The server ended the watch, or its start is too old: list again."""


def command(server: Server, pair: KeyPair, file: Path) -> list[str]:
    paths = (f"--authority={server.authority}", f"--certificate={pair.certificate}", f"--key={pair.key}")
    return [
        "env",
        f"PYTHONPATH={TREE}",
        sys.executable,
        "-P",
        "-m",
        "quire_cluster.pod_discovery",
        f"--server={server.url}",
        *paths,
        f"--file={file}",
    ]


def follow(client: ApiClient) -> Iterator[Pods]:
    """Yield all pods, first as listed and then after each change. Raise OSError or WatchEnded to start again."""
    listed = client.get(PODS)
    if not listed.ok:
        raise WatchEnded(f"listing pods: {listed.status} {listed.body}")
    pods: Pods = {pod["metadata"]["uid"]: pod for pod in listed.body["items"]}
    yield pods
    version = listed.body["metadata"]["resourceVersion"]
    query = f"watch=true&resourceVersion={version}&timeoutSeconds={WATCH_SECONDS}"
    for event in client.stream(f"{PODS}?{query}", timeout_seconds=WATCH_SECONDS + 10):
        if event["type"] == "ERROR":
            raise WatchEnded(str(event["object"].get("message")))
        apply(pods, event)
        yield pods


def apply(pods: Pods, event: Mapping[str, Any]) -> None:
    """Apply one event of a watch."""
    uid = event["object"]["metadata"]["uid"]
    if event["type"] == "DELETED":
        pods.pop(uid, None)
    else:
        pods[uid] = event["object"]


def write(file: Path, pods: Pods) -> None:
    """Write the file atomically, only if it changes, because Prometheus is notified by the system."""
    text = json.dumps(targets(pods.values()), indent=2)
    if not file.exists() or file.read_text() != text:
        staging = file.with_suffix(".incomplete")
        staging.write_text(text)
        staging.rename(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True)
    for path in ("--authority", "--certificate", "--key", "--file"):
        parser.add_argument(path, type=Path, required=True)
    options = parser.parse_args()
    pair = KeyPair(certificate=options.certificate, key=options.key)
    server = Server(url=options.server, authority=options.authority)
    client = ApiClient(server, pair, user_agent="quire-pod-discovery")
    while True:
        try:
            for pods in follow(client):
                write(options.file, pods)
        except (OSError, WatchEnded, json.JSONDecodeError) as error:
            print(f"restarting the watch: {error}", file=sys.stderr, flush=True)
            time.sleep(RETRY_SECONDS)


if __name__ == "__main__":
    main()
