"""A GPU machine with only Python, torch, Triton, transformers and numpy can run the kernels and the engine in process.

There is neither an HTTP stack nor numba, as in the measurements there (benchmarks/on_gpu.sh). The test runs in its own
process, on the Triton path, interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_kernels.dispatch import INTERPRETED

ABSENT = (
    "aiohttp",
    "fastapi",
    "llvmlite",
    "msgspec",
    "numba",
    "orjson",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "zmq",
)
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 0,
}
PROGRAM = """
import sys


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: it is not on this machine", name=name)
        return None


sys.meta_path.insert(0, Absent())

from pathlib import Path

from quire_engine.config import CacheOptions, DeviceOptions, EngineConfig, ModelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import make_engine
from quire_engine.runner import load_model

config = EngineConfig(
    model=ModelOptions(path=Path({model!r}), dtype="float32", load_format="dummy"),
    cache=CacheOptions(kv_cache_memory_bytes=1 << 20),
    scheduler=SchedulerOptions(max_num_seqs=2, max_num_batched_tokens=16),
    server=ServerOptions(),
    device=DeviceOptions(),
    threads=1,
)
engine = make_engine(load_model(config), scheduler=config.scheduler)
for key in range(2):
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    assert engine.add(Request(key=key, prompt_token_ids=[5, 6, 7 + key], params=params, seed=key)) is None
drawn = []
while engine.has_work:
    step = engine.step()
    if step is not None:
        drawn += step.token_ids
engine.close()
print("drawn", *drawn)
"""


@pytest.mark.skipif(INTERPRETED, reason="starts such a process itself")
def test_engine_runs_in_process_without_http_and_numba(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="torch's CPU build comes without triton")
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    program = PROGRAM.format(absent=ABSENT, model=str(tmp_path))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr
    words = result.stdout.split()
    assert words[0] == "drawn" and len(words) == 1 + 2 * 3
