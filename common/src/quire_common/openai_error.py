"""The body of an error as OpenAI's API writes it."""

from typing import Any


def error_body(message: str, *, type: str, param: str | None, code: str | None) -> dict[str, Any]:
    """Return the JSON object that OpenAI's clients expect with an error status."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
