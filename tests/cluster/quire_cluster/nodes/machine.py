"""Changes of the cluster to the host, recorded in advance, so that `down` can revert them.

Only one cluster with nodes can run at a time: the record below /run names its owner. A restart of the machine clears
/run and reverts the changes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from quire_cluster.errors import MachineUnfit
from quire_cluster.nodes.namespaces import OVER
from quire_cluster.nodes.plan import RUN
from quire_cluster.shell import succeeds

RECORD: Final = RUN / "machine.json"
# The kubelet sets these for the whole kernel, as if it were its only user.
KERNEL_SETTINGS: Final = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
NETWORK_NAMESPACES: Final = "/run/netns"
SYSTEM: Final = Path("/proc/sys")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The owner of the cluster and the previous state of the host."""

    state: str
    settings: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()  # that did not exist before

    def restore(self) -> None:
        for name, value in self.settings.items():
            (SYSTEM / name).write_text(value)
        for folder in self.folders:
            if folder == NETWORK_NAMESPACES:
                succeeds(["umount", folder])  # `ip netns` mounts it on itself
            if Path(folder).is_dir() and not any(Path(folder).iterdir()):
                Path(folder).rmdir()
        RECORD.unlink(missing_ok=True)
        if RUN.is_dir() and not any(RUN.iterdir()):
            RUN.rmdir()


def claim(state: Path) -> Machine:
    """Create or return the record for this state folder. Raise MachineUnfit if another cluster owns it."""
    recorded = read()
    if recorded is None:
        settings = {name: (SYSTEM / name).read_text().strip() for name in KERNEL_SETTINGS if (SYSTEM / name).exists()}
        folders = tuple(path for path in (*OVER, NETWORK_NAMESPACES) if not Path(path).exists())
        recorded = Machine(state=str(state), settings=settings, folders=folders)
        RUN.mkdir(mode=0o755, exist_ok=True)
        RECORD.write_text(json.dumps(asdict(recorded)))
        for path in folders:
            Path(path).mkdir(parents=True)
    if recorded.state != str(state):
        raise MachineUnfit(
            f"a cluster with nodes is on this machine already, with its state in {recorded.state}, and there can be "
            f"one. Use that one, or stop it: cluster.py down --state-dir {recorded.state}"
        )
    return recorded


def read() -> Machine | None:
    try:
        written = json.loads(RECORD.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return Machine(state=written["state"], settings=written["settings"], folders=tuple(written["folders"]))
