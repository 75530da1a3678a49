"""Workers compiled ahead of time: CPU levels, the usable part of a folder, and starts without compilation."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import quire_kernels.precompiled as precompiled
from quire_kernels import precompile
from quire_kernels.cpu_runtime import Worker, features
from quire_kernels.precompiled import (
    NotUsable,
    Precompiled,
    build,
    find,
    limit_numba,
    link_all,
    named_level,
    take,
)
from quire_kernels.precompiled.levels import KNOWN, LEVELS, CpuLevel, cpu_flags, highest_level

_BY_NAME = {level.name: level for level in LEVELS}
_HASWELL = _BY_NAME["x86-64-v3"].flags | {"aes", "rdrand", "invpcid"}
_AMX = {"amx_tile", "amx_bf16", "amx_int8"}
_SKYLAKE = _BY_NAME["x86-64-v4"].flags | {"aes", "adx", "rdseed"}


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        (_SKYLAKE | {"avx512_vnni", "avx512_bf16", "avx512_fp16", *_AMX}, "x86-64-v4-amx"),
        (_SKYLAKE | {"avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile"}, "x86-64-v4-bf16"),
        (_SKYLAKE | {"avx512_vnni", "avx512_bf16", "avx_vnni", "sse4a"}, "x86-64-v4-bf16"),
        (_SKYLAKE | {"avx512_vnni", "avx512_vbmi"}, "x86-64-v4-vnni"),
        (_SKYLAKE, "x86-64-v4"),
        (_HASWELL | {"avx_vnni", "sha_ni"}, "x86-64-v3-vnni"),
        (_HASWELL, "x86-64-v3"),
        (_HASWELL | {"avx512f", "avx512cd"}, "x86-64-v3"),  # Knights Landing
        (_HASWELL - {"f16c"}, None),
        (frozenset({"neon", "fphp"}), None),
    ],
)
def test_cpu_has_the_highest_level_whose_features_are_complete(has: frozenset[str], expected: str | None) -> None:
    level = highest_level(has)
    assert (None if level is None else level.name) == expected


def test_cpu_flags_are_read_from_the_first_listed_cpu(tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text("processor\t: 0\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(listed) == {"fpu", "avx2"}
    assert cpu_flags(tmp_path / "none") == frozenset()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux lists the flags")
def test_llvm_and_cpuinfo_agree_on_features() -> None:
    """The names of either are accepted."""
    from llvmlite import binding

    has = {name for name, is_there in binding.get_host_cpu_features().items() if is_there}
    for level in LEVELS:
        assert (cpu_flags() >= level.flags) == (has >= level.features)


def test_level_allows_its_features_and_forbids_all_others() -> None:
    """LLVM's name of a CPU implies further features."""
    from llvmlite import binding

    known = set(binding.get_host_cpu_features()) or KNOWN  # LLVM on another kind of CPU has none
    for level in LEVELS:
        allowed = {name[1:] for name in level.feature_string.split(",") if name.startswith("+")}
        forbidden = {name[1:] for name in level.feature_string.split(",") if name.startswith("-")}
        assert allowed == level.features
        assert not allowed & forbidden
        assert known <= allowed | forbidden


@pytest.fixture(autouse=True)
def fresh_features() -> Iterator[None]:
    """Forget after a test what it made of the CPU's features."""
    yield
    features.multiplies_tiles.cache_clear()


def _ways(names: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> tuple[bool, bool, bool, str]:
    features.multiplies_tiles.cache_clear()
    signed = frozenset(f"+{name}" for name in names)
    monkeypatch.setattr(features, "_features", lambda: signed)
    return (
        features.has_avx512(),
        features.multiplies_bfloat16(),
        features.multiplies_tiles(),
        features.byte_products(),
    )


def test_each_level_selects_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len({_ways(level.features, monkeypatch) for level in LEVELS}) == len(LEVELS)


def test_serving_a_cpu_as_its_level_selects_no_slower_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    by_flag = {"avx_vnni": "avxvnni", "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16"}
    by_flag |= {flag: flag.replace("_", "-") for flag in _AMX}
    pairs = {"avx512_vnni", "avx512_bf16"}
    for more in (set(), {"avx_vnni"}, {"avx512_vnni"}, pairs, pairs | _AMX, {"avx512_vnni", "avx_vnni"}):
        for base in (_BY_NAME["x86-64-v3"], _BY_NAME["x86-64-v4"]):
            if "avx512f" in base.features and more == {"avx_vnni"}:
                continue  # there is no such CPU: AVX512-VNNI came first
            if "avx512f" not in base.features and more - {"avx_vnni"}:
                continue
            own = highest_level(base.flags | more)
            assert own is not None
            very = base.features | {by_flag[flag] for flag in more}
            assert _ways(very, monkeypatch) == _ways(own.features, monkeypatch), (base.name, more)


def test_higher_levels_precede_lower_ones() -> None:
    for higher, lower in pairwise(LEVELS):
        assert not higher.features <= lower.features


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store" / build() / "x86-64-v3").mkdir(parents=True)
    return tmp_path / "store"


def _reason(found: Precompiled | NotUsable) -> str:
    assert isinstance(found, NotUsable)
    return found.reason


def test_unusable_precompiled_kernels_have_a_reason(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = _BY_NAME["x86-64-v3"]
    assert find(store, lowest) == Precompiled(level=lowest, folder=store / build() / "x86-64-v3")
    assert "no precompiled level" in _reason(find(store, None))
    assert "has no kernels for x86-64-v4" in _reason(find(store, _BY_NAME["x86-64-v4"]))
    assert "not a folder" in _reason(find(store / "nowhere", lowest))
    monkeypatch.setattr(precompiled, "version", lambda name: "0.0.1")
    assert "another numba" in _reason(find(store, lowest))


def test_numba_gets_the_level_unless_another_cpu_is_set(store: Path) -> None:
    lowest = _BY_NAME["x86-64-v3"]
    environment: dict[str, str] = {}
    for _ in range(2):  # the second process is a child of the first
        assert isinstance(take(store, lowest, environment), Precompiled)
        assert environment == {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": lowest.feature_string}
    other = {"NUMBA_CPU_NAME": "generic"}
    assert "another CPU" in _reason(take(store, lowest, other))
    assert other == {"NUMBA_CPU_NAME": "generic"}


def test_changed_sources_or_folders_are_another_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = {build()}
    for place in ("here", "there"):
        (tmp_path / place / "op").mkdir(parents=True)
        monkeypatch.setattr(precompiled, "_PACKAGE", tmp_path / place)
        for name in ("__init__.py", "cpu.py", "cpu_tiles.py"):
            for text in ("one", "other"):
                (tmp_path / place / "op" / name).write_text(text)
                builds.add(build())
    assert len(builds) == 13


def test_only_missing_files_are_linked(tmp_path: Path) -> None:
    image, cache = tmp_path / "image", tmp_path / "cache"
    for name in ("float32/op/a.nbi", "float32/op/a.1.nbc", "float32/op/b.nbi"):
        (image / name).parent.mkdir(parents=True, exist_ok=True)
        (image / name).write_text(f"image's {name}")
    (cache / "float32" / "op").mkdir(parents=True)
    (cache / "float32" / "op" / "a.nbi").write_text("own")
    (cache / "float32" / "op" / "b.nbi").symlink_to(tmp_path / "an image that is gone")
    for _ in range(2):
        link_all(image, cache)
    read = {str(file.relative_to(cache)): file.read_text() for file in cache.rglob("*.nb*")}
    assert read == {
        "float32/op/a.nbi": "own",
        "float32/op/a.1.nbc": "image's float32/op/a.1.nbc",
        "float32/op/b.nbi": "image's float32/op/b.nbi",
    }


_COMPUTES = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
import torch
from quire_kernels.swap_blocks.cpu import _WORKER
_WORKER.address(torch.float32)
from quire_kernels.cpu_runtime.cache import fingerprint
print("fingerprint", fingerprint())
"""


def _level_here() -> CpuLevel | None:
    return highest_level(cpu_flags())


needs_a_level = pytest.mark.skipif(
    sys.platform != "linux" or _level_here() is None, reason="only x86-64 CPUs with AVX2 are of a level"
)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., str]:
    def run(store: Path | None, *, cache: str = "cache", **environment: str) -> str:
        given = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / cache), **environment}
        given.pop("QUIRE_PRECOMPILED_KERNELS", None)
        if store is not None:
            given["QUIRE_PRECOMPILED_KERNELS"] = str(store)
        result = subprocess.run(
            [sys.executable, "-c", _COMPUTES], env=given, capture_output=True, text=True, timeout=240, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def _compile_here(store: Path) -> str:
    """Compile one small op only: ``precompile`` compiles all."""
    level = _level_here()
    assert level is not None
    made = store.with_name("made")
    program = "import torch; from quire_kernels.swap_blocks.cpu import _WORKER; _WORKER.address(torch.float32)"
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": level.cpu,
        "NUMBA_CPU_FEATURES": level.feature_string,
        "NUMBA_CACHE_DIR": str(made),
    }
    subprocess.run([sys.executable, "-c", program], env=environment, timeout=240, check=True)
    (filled,) = made.iterdir()
    (store / build()).mkdir(parents=True, exist_ok=True)
    filled.rename(store / build() / level.name)
    return level.name


@needs_a_level
def test_start_compiles_no_precompiled_kernel(tmp_path: Path, start: Callable[..., str]) -> None:
    store = tmp_path / "store"
    name = _compile_here(store)
    said = start(store)
    assert f"compiled for {name} ahead of time" in said
    assert "compiled swap_blocks" not in said
    other = start(None, cache="other")
    assert "compiled swap_blocks.cpu._swap_blocks_worker for float32" in other
    assert said.splitlines()[-1] != other.splitlines()[-1]  # the machine code of both is kept separately
    # The user's own choice has priority, and code is compiled for it.
    chosen = start(store, NUMBA_CPU_NAME="haswell", NUMBA_CPU_FEATURES="+avx2,+fma")
    assert "ahead of time" not in chosen and "compiled swap_blocks" in chosen


@needs_a_level
def test_start_without_its_build_compiles_and_logs_why(tmp_path: Path, start: Callable[..., str]) -> None:
    store = tmp_path / "store"
    (store / "0123456789abcdef").mkdir(parents=True)
    said = start(store)
    assert "compiled here" in said and "another numba" in said
    assert "compiled swap_blocks.cpu._swap_blocks_worker for float32" in said


def test_command_compiles_every_worker_of_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    level = LEVELS[0]
    compiled: list[tuple[str, torch.dtype]] = []

    def address(worker: Worker, dtype: torch.dtype) -> int:
        compiled.append((worker._function.__name__, dtype))
        return 0

    monkeypatch.setattr(Worker, "address", address)
    precompile._compile_workers(level)
    names = {name for name, _ in compiled}
    assert {
        "_attend_worker",
        "_int8_worker",
        "_sample_worker",
        "_store_kv_worker",
        "_shape_worker",
        "chain_worker",
    } <= names
    assert set(compiled) == {(name, getattr(torch, kind)) for name in names for kind in level.storage}


def test_an_unknown_level_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        precompile.main(["--out", str(tmp_path), "--levels", "x86-64-v9"])
    assert "x86-64-v9" in capsys.readouterr().err


def test_named_level_limits_the_target_of_numba() -> None:
    level = _BY_NAME["x86-64-v4"]
    environment: dict[str, str] = {}
    for _ in range(2):
        limit_numba(level, environment)
        assert environment == {"NUMBA_CPU_NAME": level.cpu, "NUMBA_CPU_FEATURES": level.feature_string}


def test_a_named_level_never_raises_another_choice_of_cpu() -> None:
    chosen = {"NUMBA_CPU_NAME": "znver4", "NUMBA_CPU_FEATURES": "+avx512f,+avx512bf16,-avx512vnni"}
    limit_numba(_BY_NAME["x86-64-v4"], chosen)
    after = chosen["NUMBA_CPU_FEATURES"]
    assert after.startswith("+avx512f,-avx512vnni,")
    assert "-avx512bf16" in after.split(",") and "-avx512f" not in after.split(",")
    limit_numba(_BY_NAME["x86-64-v4"], chosen)
    assert chosen["NUMBA_CPU_FEATURES"] == after


def test_a_level_is_named_by_the_environment() -> None:
    assert named_level({}) is None
    assert named_level({"QUIRE_KERNELS_LEVEL": "x86-64-v3"}) == _BY_NAME["x86-64-v3"]
    with pytest.raises(ValueError, match="x86-64-v9"):
        named_level({"QUIRE_KERNELS_LEVEL": "x86-64-v9"})


@needs_a_level
def test_a_start_at_a_named_level_uses_its_compiled_kernels(tmp_path: Path, start: Callable[..., str]) -> None:
    said = start(None, QUIRE_KERNELS_LEVEL="x86-64-v3")
    assert said.splitlines()[-1] != start(None, cache="other").splitlines()[-1] or _level_here() == LEVELS[-1]
