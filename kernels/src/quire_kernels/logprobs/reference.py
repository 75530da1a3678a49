"""Log-probabilities in plain torch: the reference for every implementation."""

from torch import Tensor

from quire_kernels.logprobs import Logprobs


def token_logprobs(logits: Tensor, lines: Tensor, token_ids: Tensor, most: int) -> Logprobs:
    values = logits[lines].float().log_softmax(dim=-1)  # [K, V]
    of_token = values.gather(1, token_ids[:, None])  # [K, 1]
    ordered = values.sort(dim=-1, descending=True, stable=True)
    return Logprobs(
        of_token=of_token[:, 0],
        rank=(values > of_token).sum(dim=-1) + 1,
        token_ids=ordered.indices[:, :most],
        logprobs=ordered.values[:, :most],
    )
