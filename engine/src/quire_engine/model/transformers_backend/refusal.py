"""The reasons why a model cannot run with our cache: they are found before its weights are read, and have names."""

from typing import Literal

Kind = Literal[
    "no causal language model",
    "encoder-decoder",
    "keeps a state",
    "no attention interface",
    "metadata dropped",
    "not causal",
    "other attention",
    "layers attend more than once",
    "uneven layers",
    "quantized",
    "custom code",
    "configuration",
    "not tried",
]


class Unservable(Exception):
    """An unsupported model; ``str(error)`` states the reason, with the model as its subject."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind: Kind = kind
