"""Linear layers: formats and products of weights (``backends``), and the choice for this machine (``selection``)."""

from quire_engine.model.linear.backends import (
    DeterministicLinearBackend,
    FloatLinearBackend,
    Fp8Linear,
    Fp8LinearBackend,
    HalfLinearBackend,
    Int8LinearBackend,
    Linear,
    LinearBackend,
    OneDnnLinearBackend,
    PairLinearBackend,
    TorchLinearBackend,
    filled_up,
    is_packed,
)
from quire_engine.model.linear.selection import Quantization, candidates, choose_linear_backend

__all__ = [
    "DeterministicLinearBackend",
    "FloatLinearBackend",
    "Fp8Linear",
    "Fp8LinearBackend",
    "HalfLinearBackend",
    "Int8LinearBackend",
    "Linear",
    "LinearBackend",
    "OneDnnLinearBackend",
    "PairLinearBackend",
    "Quantization",
    "TorchLinearBackend",
    "candidates",
    "choose_linear_backend",
    "filled_up",
    "is_packed",
]
