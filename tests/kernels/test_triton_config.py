"""The tables of launch configurations: the chosen entry, and errors on reading."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_kernels.triton_runtime import config
from quire_kernels.triton_runtime.config import ConfigError, config_for
from quire_kernels.triton_runtime.target import INTERPRETER, Target


def flat(block: int, warps: int = 4, stages: int = 2) -> dict[str, int]:
    return {"BLOCK": block, "num_warps": warps, "num_stages": stages}


TABLE = {
    "forward": {
        "default": {"any": flat(1), "sm_90": flat(2), "interpreter": flat(3)},
        "wide": {"any": flat(4), "sm_86": flat(5)},
        "narrow": {"sm_100": flat(6)},
    }
}
DEVICE = {"device": "NVIDIA H200", "capability": 90, "kernels": {"op.forward": {"wide": flat(7), "default": flat(8)}}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a package with one op and one tuned device."""
    (tmp_path / "devices").mkdir()
    (tmp_path / "op.json").write_text(json.dumps(TABLE))
    (tmp_path / "devices" / "NVIDIA_H200.json").write_text(json.dumps(DEVICE))
    monkeypatch.setattr(config, "FOLDER", tmp_path)
    monkeypatch.delenv("QUIRE_KERNEL_CONFIGS", raising=False)
    config.forget()
    yield tmp_path
    config.forget()


@pytest.mark.parametrize(
    ("target", "key", "block"),
    [
        (Target(80), "default", 1),
        (Target(90), "default", 2),
        (INTERPRETER, "default", 3),
        (Target(90), "wide", 4),
        (Target(89), "wide", 5),
        (Target(86), "wide", 5),
        (Target(103), "narrow", 6),
        (Target(90), "narrow", 2),  # the key is known, but not for this family
        (Target(121), "unheard of", 1),
        (Target(90, "NVIDIA H200"), "wide", 7),
        (Target(90, "NVIDIA H200"), "default", 8),
        (Target(90, "NVIDIA H200"), "unheard of", 8),
        (Target(90, "NVIDIA H100 80GB HBM3"), "wide", 4),
    ],
)
def test_the_nearest_configuration_is_chosen(target: Target, key: str, block: int) -> None:
    found = config_for("op.forward", target, key)
    assert found.options == flat(block) and found.blocks == {"BLOCK": block}


@pytest.mark.parametrize(
    ("capability", "family"),
    [
        (0, "interpreter"),
        (80, "sm_80"),
        (86, "sm_86"),
        (87, "sm_80"),
        (89, "sm_86"),
        (90, "sm_90"),
        (100, "sm_100"),
        (103, "sm_100"),
        (110, "sm_100"),
        (120, "sm_120"),
        (121, "sm_120"),
        (130, "sm_120"),
    ],
)
def test_each_capability_has_a_family(capability: int, family: str) -> None:
    assert config.family(Target(capability)) == family


def test_user_folder_takes_precedence_over_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "NVIDIA_H200.json").write_text(json.dumps({**DEVICE, "kernels": {"op.forward": {"wide": flat(9)}}}))
    monkeypatch.setenv("QUIRE_KERNEL_CONFIGS", str(own))
    assert config_for("op.forward", Target(90, "NVIDIA H200"), "wide").blocks["BLOCK"] == 9
    assert config_for("op.forward", Target(90, "NVIDIA H200"), "default").blocks["BLOCK"] == 2


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([], r"op.json: is \[\]; an object is needed"),
        ({"forward": {"default": []}}, r"forward: default: is \[\]; an object is needed"),
        ({"forward": {"default": {"sm_90": flat(1)}}}, "lacks 'default' for 'any'"),
        ({"forward": {"default": {"any": flat(1), "sm_91": flat(1)}}}, "'sm_91' is no family"),
        ({"forward": {"default": {"any": {"BLOCK": 1}}}}, "any: lacks num_warps, num_stages"),
        ({"forward": {"default": {"any": flat(1), "sm_90": {"num_warps": 4}}}}, "sm_90: lacks BLOCK, num_stages"),
        (
            {"forward": {"default": {"any": flat(1), "sm_90": flat(1) | {"BLOK": 2}}}},
            "sm_90: has BLOK, which it should not; its fields are BLOCK, num_warps, num_stages",
        ),
        ({"forward": {"default": {"any": flat(0)}}}, "any: BLOCK: is 0; a whole number"),
        ({"forward": {"default": {"any": flat(1) | {"BLOCK": True}}}}, "BLOCK: is True"),
        ({"forward": {"default": {"any": flat(1, warps=3)}}}, "num_warps: is 3; a power"),
        ({"forward": {"default": {"any": flat(1, stages=9)}}}, "num_stages: is 9; at"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_on_reading(folder: Path, table: Any, words: str) -> None:
    (folder / "op.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=words):
        config_for("op.forward", Target(90))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "NVIDIA_H200.json: cannot be read: Expecting property name"),
        (json.dumps({"device": "NVIDIA H200"}), "NVIDIA_H200.json: kernels: is None; an object is needed"),
        (json.dumps({"kernels": {"op.back": {}}}), "kernels: op.back: no such kernel; op has forward"),
        (json.dumps({"kernels": {"op.forward": {"wide": {"BLOCK": 1}}}}), "op.forward: wide: lacks num_warps"),
    ],
)
def test_a_device_file_that_cannot_be_used_is_refused(folder: Path, content: str, words: str) -> None:
    (folder / "devices" / "NVIDIA_H200.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        config_for("op.forward", Target(90, "NVIDIA H200"))


@pytest.mark.parametrize(("kernel", "words"), [("op.back", "has no kernel 'back'"), ("po.x", "no such")])
def test_a_kernel_without_a_table_is_named(kernel: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_for(kernel, Target(90))


def test_every_table_of_the_package_can_be_read() -> None:
    package = Path(config.__file__).with_name("configs")
    for path in package.glob("*.json"):
        assert config.read_op_tables(path)


def test_a_device_file_is_named_after_the_device() -> None:
    assert config.device_file_name("NVIDIA H100 80GB HBM3") == "NVIDIA_H100_80GB_HBM3.json"
    assert config.device_file_name("GeForce RTX 4090 (Ti) / x") == "GeForce_RTX_4090_Ti_x.json"
