"""The rejection of requests that could never be served, whatever the load, and what would fit. Pure."""


def refuse(
    *, num_prompt: int, limit: int, max_model_len: int, max_cached_tokens: int | None, pools: bool = False
) -> str | None:
    """Return why a request can never be served, or None.

    ``limit`` is the length at which the sequence ends; with ``pools`` that is one token behind its prompt.
    ``max_cached_tokens`` is the capacity of the KV cache for a single sequence, or None if every layer has a window.
    """
    if pools:
        most = max_model_len if max_cached_tokens is None else min(max_model_len, max_cached_tokens)
        if num_prompt <= most:
            return None
        what = "this model takes" if most == max_model_len else "the KV cache holds"
        return f"the prompt has {num_prompt} tokens; {what} at most {most}"
    if num_prompt >= max_model_len:
        return (
            f"the prompt has {num_prompt} tokens; this model takes at most {max_model_len - 1}, "
            f"which leaves one of its {max_model_len} for the answer"
        )
    # The last token of a sequence is sampled but never computed: it needs no slot.
    if max_cached_tokens is not None and limit - 1 > max_cached_tokens:
        most = max_cached_tokens + 1
        advice = f"max_tokens of at most {most - num_prompt} would fit" if num_prompt < most else "no answer would fit"
        return (
            f"the prompt of {num_prompt} tokens and its answer come to {limit} tokens; "
            f"the KV cache holds {most}, so {advice}"
        )
    return None
