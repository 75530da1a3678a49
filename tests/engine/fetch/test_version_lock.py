"""Versions of a model on a full volume: those in use stay, the others are deleted, the oldest first."""

import os
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fetch_support.hub_stub import HubStub

from quire_engine import flags
from quire_engine.__main__ import hold_models
from quire_engine.errors import FetchError
from quire_engine.fetch import version_lock
from quire_engine.fetch.version_lock import hold, in_use, lock_file, locks_reach_everybody, remove_unused

Fetch = Callable[..., Awaitable[Path]]
HOLD = "import sys, pathlib, quire_engine.fetch.version_lock as v; print(v.hold(pathlib.Path(sys.argv[1]))); input()"


def version(folder: Path, name: str, *, idle_seconds: float = 7200.0, is_locked: bool = True) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    (made / "config.json").write_text("{}")
    if is_locked:
        lock_file(made).touch()
        then = time.time() - idle_seconds
        os.utime(lock_file(made), (then, then))
    return made


def test_least_recently_used_version_is_removed_first(tmp_path: Path) -> None:
    newer, older = version(tmp_path, "newer", idle_seconds=7200), version(tmp_path, "older", idle_seconds=9999)
    kept = version(tmp_path, "kept", idle_seconds=99_999)
    assert remove_unused(tmp_path, keep=kept)
    assert (older.exists(), newer.exists()) == (False, True)
    assert remove_unused(tmp_path, keep=kept) and not remove_unused(tmp_path, keep=kept)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "kept.lock"]


def test_recent_and_unlocked_versions_are_never_removed(tmp_path: Path) -> None:
    version(tmp_path, "recent", idle_seconds=60)
    version(tmp_path, "of an older quire", is_locked=False)
    assert not remove_unused(tmp_path, keep=tmp_path / "new")


def test_version_in_use_stays_until_its_engine_ends(tmp_path: Path) -> None:
    used = version(tmp_path / "org--m", "v1")
    link = tmp_path / "org--m@main"
    link.symlink_to("org--m/v1")
    engine = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(link)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with engine:
        assert engine.stdout is not None and engine.stdout.readline().strip().isdecimal()
        assert not remove_unused(used.parent, keep=used.parent / "new") and used.is_dir()
        engine.kill()
    assert remove_unused(used.parent, keep=used.parent / "new") and not used.exists()


def test_the_lock_of_a_folder_inside_a_version_is_the_versions(tmp_path: Path) -> None:
    inside = version(tmp_path, "v1") / "weights" / "8b"
    inside.mkdir(parents=True)
    file = hold(inside)
    assert file is not None and not remove_unused(tmp_path, keep=tmp_path / "new")
    os.close(file)


def test_an_engine_keeps_its_model_and_its_draft_model(tmp_path: Path) -> None:
    model, draft = version(tmp_path / "org--m", "v1"), version(tmp_path / "org--draft", "v1")
    hold_models(flags.parse(["--model", str(model), "--spec-model", str(draft)], {}))
    for used in (model, draft):
        assert not remove_unused(used.parent, keep=used.parent / "new") and used.is_dir()


def test_model_outside_the_cache_has_no_lock(tmp_path: Path) -> None:
    assert hold(tmp_path) is None and hold(Path("/")) is None


def test_a_check_keeps_a_version_for_a_while(tmp_path: Path) -> None:
    checked = version(tmp_path, "v1")
    with in_use(checked) as is_there:
        assert is_there
    assert not remove_unused(tmp_path, keep=tmp_path / "new")
    with in_use(tmp_path / "gone") as is_there:
        assert not is_there


MOUNT = "36 25 0:32 / {point} rw,relatime shared:1 - {kind} source {options}\n"


@pytest.mark.parametrize(
    ("kind", "options", "everybody"),
    [
        ("ext4", "rw", True),
        ("nfs4", "rw,local_lock=none", True),
        ("nfs", "rw,nolock", False),
        ("nfs4", "rw,local_lock=all", False),
        ("fuse.gcsfuse", "rw", False),
    ],
)
def test_locks_count_only_where_all_nodes_see_them(tmp_path: Path, kind: str, options: str, everybody: bool) -> None:
    mounts = tmp_path / "mountinfo"
    root = MOUNT.format(point="/", kind="overlay", options="rw")
    mounts.write_text(root + MOUNT.format(point=tmp_path, kind=kind, options=options))
    assert locks_reach_everybody(tmp_path / "org--m", mounts) is everybody
    mounts.write_text("")
    assert not locks_reach_everybody(tmp_path, mounts)


async def test_unused_version_is_removed_from_a_full_volume(
    hub: HubStub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(version_lock, "locks_reach_everybody", lambda folder: True)
    old = version(tmp_path / "cache" / "org--tiny", "0" * 40)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 0, 1000 if old.exists() else 10**9))
    folder = await fetch("hf://org/tiny")
    assert folder.is_dir() and not old.exists() and lock_file(folder).is_file()


async def test_full_volume_of_used_versions_is_an_error(
    hub: HubStub, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(version_lock, "locks_reach_everybody", lambda folder: True)
    old = version(tmp_path / "cache" / "org--tiny", "0" * 40)
    file = hold(old)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(FetchError):
        await fetch("hf://org/tiny")
    assert old.is_dir() and file is not None
    os.close(file)
