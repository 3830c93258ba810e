"""The config.json files of published checkpoints are read as transformers reads them.

They include the first and later published forms of a family's config.json.
"""

import json
from pathlib import Path

import pytest

from batch_manager.models import read_spec

pytest.importorskip("transformers")

from .random_configs import FAMILIES, numbers_of_transformers  # noqa: E402
from .test_config_differential import numbers_of  # noqa: E402

PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_it_is_read_as_transformers_reads_it(name, tmp_path):
    config = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = numbers_of(read_spec(tmp_path))
    if config["architectures"][0] in FAMILIES:
        config = {field: value for field, value in config.items() if field != "auto_map"}
        expected = numbers_of_transformers({**config, "architectures": list(config["architectures"])})
        assert {field: found[field] for field in expected if field in found} == {
            field: value for field, value in expected.items() if field in found}
        assert len(expected.keys() & found.keys()) > 15
