"""The controller of LeaderWorkerSets when its control plane fails."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from quire_cluster.control_plane import ControlPlane
from quire_cluster.errors import KubectlFailed
from quire_cluster.group_controller import GroupController


class Failing:
    """A control plane that refuses everything."""

    def __init__(self, state: Path) -> None:
        self.state, self.admin_kubeconfig = state, state / "admin.kubeconfig"

    def kubectl(self, *arguments: str) -> str:
        raise KubectlFailed("timed out")

    def identity(self, *_: object, **__: object) -> None:
        raise KubectlFailed("timed out")


@pytest.mark.parametrize("act", [GroupController.install, GroupController.uninstall])
def test_no_controller_outlives_its_kinds(act: Callable[[GroupController], None], tmp_path: Path) -> None:
    """It may run when it is installed, since an earlier run was killed."""
    (tmp_path / "lws").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "lws").chmod(0o755)
    controller = GroupController(cast(ControlPlane, Failing(tmp_path)), tmp_path / "lws")
    controller.process.start()
    try:
        with pytest.raises(KubectlFailed):
            act(controller)
        assert controller.process.pid is None
    finally:
        controller.process.kill()
