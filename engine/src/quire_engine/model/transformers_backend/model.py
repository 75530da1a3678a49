"""A loaded transformers model for the runner: one flat batch of all sequences' tokens, logits for selected rows.

Legend: T tokens, R rows of logits, V vocabulary.
"""

from torch import Tensor
from transformers import PreTrainedModel

from quire_engine.model.layers import ModelInputs
from quire_engine.model.transformers_backend.attention import AttentionStep, LayerPlace
from quire_engine.model.transformers_backend.layers import AttentionLayers
from quire_kernels.kv_cache import KVCache


class TransformersModel:
    """A ``family.CausalLM``. The groups of its inputs are ``kv_groups`` of the shape with ``windows``."""

    def __init__(self, model: PreTrainedModel, layers: AttentionLayers, windows: tuple[int | None, ...]) -> None:
        groups = tuple(dict.fromkeys(windows))
        self._model = model
        self._places = {
            model.get_submodule(name): LayerPlace(cache=index, group=groups.index(window))
            for index, (name, window) in enumerate(zip(layers.names, windows, strict=True))
        }

    def __call__(self, inputs: ModelInputs, caches: tuple[KVCache, ...]) -> Tensor:
        """Return logits [R, V]."""
        output = self._model(
            input_ids=inputs.token_ids.unsqueeze(0),  # [1, T]
            position_ids=inputs.positions.unsqueeze(0),
            logits_to_keep=inputs.logits_rows,
            use_cache=False,
            quire_step=AttentionStep(inputs=inputs, caches=caches, places=self._places),
        )
        logits: Tensor = output.logits[0]  # [R, V]
        return logits
