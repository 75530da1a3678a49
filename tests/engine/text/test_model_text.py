from pathlib import Path

import pytest

from quire_engine.errors import ModelFolderError
from quire_engine.text.model_text import SamplingDefaults, load_sampling_defaults


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, SamplingDefaults()),
        ("{}", SamplingDefaults()),
        (
            '{"temperature": 0.6, "top_p": 1, "top_k": 50}',
            SamplingDefaults(params={"temperature": 0.6, "top_p": 1.0, "top_k": 50}),
        ),
        ('{"top_k": 0, "temperature": null}', SamplingDefaults()),
        (
            '{"repetition_penalty": 1.1, "typical_p": 0.9, "max_new_tokens": 64}',
            SamplingDefaults(params={"repetition_penalty": 1.1, "typical_p": 0.9}, max_new_tokens=64),
        ),
    ],
)
def test_reads_the_models_own_defaults(tmp_path: Path, content: str | None, expected: SamplingDefaults) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(content)
    assert load_sampling_defaults(tmp_path) == expected


@pytest.mark.parametrize(
    "content",
    [
        '{"temperature": "hot"}',
        '{"temperature": -1}',
        '{"top_p": 3}',
        '{"top_k": 1.5}',
        '{"max_new_tokens": true}',
        "nope",
    ],
)
def test_a_default_out_of_range_stops_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelFolderError, match=r"generation_config\.json"):
        load_sampling_defaults(tmp_path)
