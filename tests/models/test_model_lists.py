"""README.md and docs/models.md list the models that the tables of the package have, and count them."""

import re
from pathlib import Path

import pytest

from batch_manager.models.registry import _SHIPPED, is_shipped_type
from batch_manager.models.transformers.proven_types import PROVEN
from batch_manager.weights.gguf_config import FAMILIES

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=["README.md", "docs/models.md"])
def page(request):
    return (REPOSITORY / request.param).read_text()


def test_every_architecture_is_listed_once(page):
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert sorted(re.findall(r"`(\w+(?:ForCausalLM|LMHeadModel))`", "\n".join(rows))) == sorted(_SHIPPED)


def test_the_counts_of_types_that_run_through_transformers(page):
    more = sum(not is_shipped_type(model_type) for model_type in PROVEN)
    counts = [int(count) for count in re.findall(r"\b(\d+)(?= more model types| model types| of them)", page)]
    assert counts in ([more], [len(PROVEN), more])


def test_every_architecture_of_gguf_files_is_listed():
    section = (REPOSITORY / "docs/models.md").read_text().partition("The architectures are ")[2].partition(". ")[0]
    assert set(re.findall(r"`([^`]+)`", section)) == set(FAMILIES)
