"""The division of a model among the ranks of a replica (tensor parallelism). Pure arithmetic.

Every rank has a share of each layer, of the embedding table and of the LM head. If there are fewer KV heads than ranks,
several ranks keep the same head.
"""

from quire_operator.domain.capacity.model_config import ModelConfig
from quire_operator.domain.resource.parallelism import MAX_SIZE, Parallelism


def parallelism_problem(shape: Parallelism, config: ModelConfig) -> str | None:
    """Return why the model cannot be divided as ``spec.parallelism`` says, or None; the engine has the same rules."""
    rule = _broken_rule(config, shape.tensor)
    if rule is None:
        return None
    fits = max(size for size in range(1, min(shape.tensor, MAX_SIZE)) if _broken_rule(config, size) is None)
    return f"spec.parallelism.tensor: must {rule}, got {shape.tensor}; set it to {fits}"


def _broken_rule(config: ModelConfig, tensor: int) -> str | None:
    if config.heads % tensor:
        return f"divide the {config.heads} attention heads of the model"
    if config.kv_heads % tensor and tensor % config.kv_heads:
        return f"divide the {config.kv_heads} KV heads of the model or be a multiple of them"
    if config.intermediate_size % tensor:
        return f"divide the intermediate size {config.intermediate_size} of the model"
    return None


def kv_copies(config: ModelConfig, shape: Parallelism) -> int:
    """Return the number of ranks that keep the same KV head."""
    return max(1, shape.tensor // config.kv_heads)
