"""Every architecture of docs/models.md trains as the page states."""

from pathlib import Path

import pytest
from tests.support.architectures import ARCHITECTURES, NAMES, trial

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text().splitlines()
QUICK = ("gpt_oss", "gpt2", "qwen2_vl", "t5")
LIKE_OTHERS = {*("smollm3", "mistral", "phi", "gpt_neox", "olmo2", "stablelm", "granite", "qwen2", "qwen3", "gemma2")}
LIKE_OTHERS |= {"gemma3_text", "gpt_neo", "granitemoe", "qwen3_moe"}
"""Linear layers or experts as llama's, gpt2's and mixtral's: `python -m docs.make_models` alone trains them."""

pytestmark = pytest.mark.model


@pytest.mark.rest
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
     for name in ARCHITECTURES if name not in LIKE_OTHERS],
)  # fmt: skip
def test_an_architecture_does_what_its_line_states(name, tmp_path):
    """If not: python -m docs.make_models."""
    row = trial(name, tmp_path)
    assert row in PAGE


def test_the_page_has_no_other_lines():
    first = PAGE.index("|---|---|---|---|---|") + 1
    rows = PAGE[first : PAGE.index("", first)]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [NAMES[name] for name in ARCHITECTURES]
