import hashlib
from pathlib import Path

import pytest
from set_clock import SetClock
from starlette.datastructures import Headers

from quire_engine.api.auth import ANONYMOUS, Access
from quire_engine.config import AccessOptions
from quire_engine.errors import Forbidden, Unauthorized

SECRET = hashlib.sha256(b"secret-key-1")


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def guarded(tmp_path: Path, clock: SetClock, **files: str) -> Access:
    paths = {}
    for name, content in files.items():
        paths[f"{name}_key_file"] = tmp_path / name
        (tmp_path / name).write_text(content)
    return Access(AccessOptions(**paths), clock)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nothing"])
def test_every_path_but_the_probes_needs_the_key(tmp_path: Path, path: str) -> None:
    access = guarded(tmp_path, SetClock(), api="secret-key-1")
    assert access.check(path, bearer("secret-key-1"), "10.0.0.9").tenant == f"key-{SECRET.hexdigest()[:8]}"
    for headers in (Headers({}), bearer("other-key-1"), bearer(""), Headers({"authorization": "Basic secret-key-1"})):
        with pytest.raises(Unauthorized):
            access.check(path, headers, "127.0.0.1")


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
def test_probes_and_metrics_are_open(tmp_path: Path, path: str) -> None:
    assert guarded(tmp_path, SetClock(), api="secret-key-1").check(path, Headers({}), None) == ANONYMOUS


def test_metrics_can_have_a_key_of_their_own(tmp_path: Path) -> None:
    access = guarded(tmp_path, SetClock(), api="secret-key-1", metrics="metrics-key-1")
    assert access.check("/metrics", bearer("metrics-key-1"), None).tenant is not None
    with pytest.raises(Unauthorized):
        access.check("/metrics", bearer("secret-key-1"), None)


@pytest.mark.parametrize(
    ("host", "allowed"), [("127.0.0.1", True), ("::1", True), ("10.0.0.9", False), (None, False), ("x", False)]
)
def test_admin_without_a_key_is_limited_to_localhost(tmp_path: Path, host: str | None, allowed: bool) -> None:
    access = guarded(tmp_path, SetClock(), api="secret-key-1")
    if allowed:
        assert access.check("/admin/drain", Headers({}), host) == ANONYMOUS
        return
    with pytest.raises(Forbidden):
        access.check("/admin/drain", bearer("secret-key-1"), host)


def test_admin_route_accepts_admin_keys_only(tmp_path: Path) -> None:
    access = guarded(tmp_path, SetClock(), api="secret-key-1", admin="admin-key-1")
    assert access.check("/admin/drain", bearer("admin-key-1"), "10.0.0.9").tenant is not None
    with pytest.raises(Unauthorized):
        access.check("/admin/drain", bearer("secret-key-1"), "127.0.0.1")


@pytest.mark.parametrize("spoil", ["broken", "removed"])
def test_key_file_damaged_later_keeps_the_previous_keys(tmp_path: Path, spoil: str) -> None:
    clock = SetClock()
    access = guarded(tmp_path, clock, api="first-key-1")
    if spoil == "removed":
        (tmp_path / "api").unlink()
    else:
        (tmp_path / "api").write_text("no")
    clock.now = 2.0
    assert access.check("/v1/models", bearer("first-key-1"), None).tenant is not None


def test_command_line_keys_grant_the_same_access_as_a_file() -> None:
    access = Access(AccessOptions(api_keys=("one", "two")), SetClock())
    names = {access.check("/v1/models", bearer(key), "10.0.0.9").tenant for key in ("one", "two")}
    assert len(names) == 2 and None not in names
    for headers in (Headers({}), bearer("three")):
        with pytest.raises(Unauthorized):
            access.check("/v1/models", headers, "127.0.0.1")
