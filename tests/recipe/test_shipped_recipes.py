"""The recipes for real models, run end to end on small replicas: same architecture, same data layout, every stage."""

import io
import json

import pytest
import torch
from rich.console import Console
from soren_align import recipe
from soren_align.core import shipped
from soren_align.launch.preparation import prepare
from soren_align.run.folder import RunFolder
from tests.support.benchmark_data import write_datasets
from tests.support.published_data import ultrachat_200k, ultrafeedback_binarized
from tests.support.published_tokenizers import mistral, qwen
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, Qwen2Config

pytestmark = pytest.mark.model

OPTIMIZERS = ("adamw", "muon", "htmuon", "soren")
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "max_position_embeddings": 1024}
FAMILIES = {"qwen2.5-3b": "sft", "mistral-7b": "dpo"}
OURS = ("soren", "released-soren", "released-exact")
NAMES = [f"{family}/{name}" for family in FAMILIES for name in (*(f"paper-{o}" for o in OPTIMIZERS), *OURS)]
TRAINED = [f"qwen2.5-3b/{name}" for name in ("paper-soren", "paper-adamw", "released-exact")]
TRAINED += [f"mistral-7b/{name}" for name in ("soren", "paper-muon", "paper-htmuon")]
SHRUNK = ["trainer.use_cpu=true", "trainer.bf16=false", "trainer.max_length=96", "trainer.max_steps=2"]
SHRUNK += ["trainer.per_device_train_batch_size=2", "run.global_batch_size=4", "run.num_threads=1"]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """--set overrides of each family: a model and data like the real ones, made here."""
    root = tmp_path_factory.mktemp("replicas")
    made = {}
    for family, tokenizer, config, data in (
        ("qwen2.5-3b", qwen(), Qwen2Config, ultrachat_200k(root)["train_sft"]),
        ("mistral-7b", mistral(), MistralConfig, ultrafeedback_binarized(root)["train_prefs"]),
    ):
        torch.manual_seed(0)
        tied = family == "qwen2.5-3b"
        small = config(
            **SHAPE, vocab_size=len(tokenizer), tie_word_embeddings=tied, eos_token_id=tokenizer.eos_token_id
        )
        AutoModelForCausalLM.from_config(small).save_pretrained(root / family)
        tokenizer.save_pretrained(root / family)
        made[family] = [f"model.name_or_path={root / family}", f"data.train.path={data}", *SHRUNK]
    return made


@pytest.fixture(scope="module")
def runs(replicas, tmp_path_factory):
    """Each optimizer and map trained once: {name: its run folder}."""
    from soren_align.training import run
    from soren_align.training import setup as training_setup

    root, found = tmp_path_factory.mktemp("runs"), {}
    for name in TRAINED:
        folder = RunFolder(root / name)
        loaded = recipe.load(name, [*replicas[name.split("/")[0]], f"run.output_dir={root / name}"])
        prepare(folder, loaded, 1)
        setup = training_setup.set_up_training(loaded, folder)
        assert run.train(setup, folder, Console(file=io.StringIO(), width=80))
        found[name] = folder
    return found


def test_each_family_has_the_papers_four_and_ours():
    there = [name for name in shipped.recipes() if name.split("/")[0] in FAMILIES]
    assert sorted(there) == sorted(NAMES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_papers_recipes_have_its_selected_learning_rates(family):
    grids = json.loads((shipped.ROOT / "recipes" / family / "paper-grid.json").read_text())
    for optimizer in OPTIMIZERS:
        loaded = recipe.load(f"{family}/paper-{optimizer}")
        assert loaded.optimizer.name == optimizer
        assert loaded.optimizer.lr == grids["lr"][optimizer]["selected"]
        assert loaded.optimizer.lr in grids["lr"][optimizer]["grid"]
        assert loaded.optimizer.weight_decay == grids["weight_decay"]


@pytest.mark.parametrize("name", NAMES)
def test_recipes_of_a_family_differ_in_their_optimizer_alone(name):
    """And ours in the order of the examples: the paper's have plain batches."""
    family = name.split("/")[0]
    first, this = (recipe.load(n).model_dump(exclude={"optimizer", "extends"}) for n in (f"{family}/paper-soren", name))
    for loaded in (first, this):
        loaded["run"].pop("output_dir")
    is_ours = name == f"{family}/soren"
    assert this["trainer"].pop("train_sampling_strategy", None) == ("group_by_length" if is_ours else None)
    assert this == first
    assert this["task"] == FAMILIES[family]
    assert this["eval"]["suite"] == "open-llm-leaderboard-v1"


@pytest.mark.parametrize("name", NAMES)
def test_a_copied_recipe_is_the_same_recipe(name, tmp_path):
    copy = tmp_path / "mine.yaml"
    copy.write_text(shipped.recipes()[name].read_text())
    assert recipe.load(str(copy)) == recipe.load(name)


@pytest.mark.rest
@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains_and_its_model_loads_in_plain_transformers(runs, replicas, name):
    folder, start = runs[name], replicas[name.split("/")[0]][0].split("=")[1]
    trained = AutoModelForCausalLM.from_pretrained(folder.model)
    before = AutoModelForCausalLM.from_pretrained(start).state_dict()
    moved = [key for key, value in trained.state_dict().items() if not torch.equal(value, before[key])]
    assert len(moved) > len(before) / 2
    tokenizer = AutoTokenizer.from_pretrained(folder.model)
    said = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert "Hello" in said
    assert tokenizer.eos_token == ("<|im_end|>" if name.startswith("qwen") else "</s>")
    stops = trained.generation_config.eos_token_id
    assert tokenizer.eos_token_id in (stops if isinstance(stops, list) else [stops])
    record = folder.read()
    matrices = 7 * SHAPE["num_hidden_layers"]
    assert record["optimizer"]["num_matrices"] == (0 if "adamw" in name else matrices)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_model_of_a_family_is_evaluated_beside_its_start(runs, family, tmp_path_factory):
    from soren_align.evaluate.run.lineage import lineages
    from soren_align.evaluate.run.stage import evaluate

    console = Console(file=io.StringIO(), width=200)
    names = [name for name in TRAINED if name.startswith(family)]
    root = write_datasets(tmp_path_factory.mktemp("questions"), num_questions=2)
    asked = recipe.load(names[0]).eval.model_copy(update={"data_root": str(root), "batch_size": 16})
    output = tmp_path_factory.mktemp("evaluation")
    rows = lineages([str(runs[name].path) for name in names])
    results = evaluate(rows, asked, output / family, cache=output / "cache", console=console)
    assert len(results["rows"]) == 1 + len(names)
    assert all(len(row["scores"]) == 7 for row in results["rows"])  # six benchmarks and their mean
    table = (output / family / "table.md").read_text()
    assert "Soren" in table  # the paper's own row, beneath
