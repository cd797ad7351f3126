"""Published perplexities are those of the paper, are printed after a pre-training, and need a table and a model."""

import re

import pytest
from soren_align import recipe
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.recipe.perplexities import describe_published, load_perplexities

PAPER = {  # by AdamW, Muon, HTMuon, Soren; N of the released loop
    "LLaMA-60M": ([44.54, 36.86, 35.32, 35.14], 100),
    "LLaMA-135M": ([36.96, 27.42, 26.15, 26.15], None),
    "LLaMA-350M": ([23.49, 21.73, 22.58, 21.53], 200),
    "LLaMA-1B": ([20.82, 18.41, 18.44, 18.29], 400),
}
REDUCTIONS = {"Muon": [1.72, 1.27, 0.20, 0.12], "AdamW": [9.40, 10.81, 1.96, 2.53], "HTMuon": [0.18, 0, 1.05, 0.15]}
TABLE = "source: ours\ndata: texts\nmodels:\n  tiny: {perplexities: {AdamW: 20.5}}\n"


def test_the_table_is_the_papers():
    table = load_perplexities("paper/pretraining")
    assert {name: ([*runs.perplexities.values()], runs.num_batches) for name, runs in table.models.items()} == PAPER
    assert all([*runs.perplexities] == ["AdamW", "Muon", "HTMuon", "Soren"] for runs in table.models.values())
    for other, differences in REDUCTIONS.items():  # the paper's text, which has 1.57 for 1.27
        for runs, difference in zip(table.models.values(), differences, strict=True):
            assert runs.perplexities[other] - runs.perplexities["Soren"] == pytest.approx(difference)


def test_the_lines_have_both_numbers_and_the_source():
    table = load_perplexities("paper/pretraining")
    published, corrected, source = describe_published(table, "LLaMA-60M")
    assert published.endswith("not compared: AdamW 44.54, Muon 36.86, HTMuon 35.32, Soren 35.14")
    assert re.search(r"divided 100 losses by 101: AdamW 46.26, .* Soren 36.41$", corrected)
    assert "table 1" in source
    assert len(describe_published(table, "LLaMA-135M")) == 2


def test_every_recipe_of_a_size_names_its_model():
    for name in shipped.recipes():
        if name.startswith("llama-c4/"):
            published = recipe.load(name).run.published
            assert published.model.lower() == "llama-" + name.split("/")[1].split("-")[0]
    assert recipe.load("qwen3-0.6b/scratch-soren").run.published is None


@pytest.mark.parametrize(("name", "overrides", "message"), [
    ("llama-c4/60m-soren", ["run.published.model=LLaMA-60B"], "run.published.model: paper/pretraining has no model "
     "'LLaMA-60B'; did you mean 'LLaMA-60M'?"),
    ("llama-c4/60m-soren", ["run.published.table=paper/pretrainin"], "did you mean 'paper/pretraining'?"),
    ("llama-c4/60m-soren", ["run.published.table=paper/sft"], "run.published.table"),
    ("quickstart/sft", ["run.published={table: paper/pretraining, model: LLaMA-60M}"], "only a pre-training reports"),
])  # fmt: skip
def test_a_mistake_is_reported_before_training(name, overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        recipe.load(name, overrides)


@pytest.mark.parametrize(("old", "new", "message"), [
    ("source:", "sources:", "sources: unknown key"), ("20.5", "0.5", "models.tiny.perplexities.AdamW"),
    ("{AdamW: 20.5}", "{}", "models.tiny.perplexities"),
])  # fmt: skip
def test_a_file_of_ones_own_is_read_strictly(tmp_path, old, new, message):
    file = tmp_path / "mine.yaml"
    file.write_text(TABLE)
    assert load_perplexities(str(file)).models["tiny"].perplexities == {"AdamW": 20.5}
    file.write_text(TABLE.replace(old, new))
    with pytest.raises(UserError, match=re.escape(message)):
        load_perplexities(str(file))
