"""What a person may type: keys as words, runs without a recipe, a folder from one's own questions, grouped help."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from soren_align import recipe
from soren_align.cli import app, grammar
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.recipe.loader import merged_text

FLAGS = {"--no-eval": True, "--set": False, "--processes": False, "--help": True}


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder; training and its head are replaced by a record of the recipe."""
    monkeypatch.chdir(tmp_path)
    recipes = []
    monkeypatch.setattr("soren_align.launch.commands.train", lambda resolved, processes: recipes.append(resolved) or 0)

    def call(*arguments):
        code = app.main(arguments)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err, recipe=recipes[-1] if recipes else None)

    return call


def test_help_has_the_words_of_a_user_and_no_types(run):
    for name in ("sft", "chat", "compare", "spectrum"):
        text = run(name, "--help").out
        assert "Arguments:" in text
        assert not re.search(r"<\w+>|x>=|None", text)


@pytest.fixture
def model(tmp_path):
    """A folder that passes for a model's until its weights are read."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return "./model"


def faq(path, rows=60, head="Question;Réponse"):
    lines = [f"Où est le numéro {i} ?;Au rayon {i}." for i in range(rows)]
    path.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8-sig")


@pytest.mark.parametrize(("words", "expected"), [
    (["r.yaml", "optimizer.lr=1e-3"], ["r.yaml", "--set", "optimizer.lr=1e-3"]),
    (["r.yaml", "--optimizer.lr", "1e-3"], ["r.yaml", "--set", "optimizer.lr=1e-3"]),
    (["r.yaml", "--optimizer.lr=1e-3", "--no-eval"], ["r.yaml", "--set", "optimizer.lr=1e-3", "--no-eval"]),
    (["r.yaml", "--learning_rate", "1e-3"], ["r.yaml", "--set", "optimizer.lr=1e-3"]),
    (["r.yaml", "--learning-rate", "1e-3"], ["r.yaml", "--set", "optimizer.lr=1e-3"]),
    (["r.yaml", "--max_seq_length", "8"], ["r.yaml", "--set", "trainer.max_length=8"]),
    (["r.yaml", "--bf16"], ["r.yaml", "--set", "trainer.bf16=true"]),
    (["r.yaml", "--bf16", "--no-eval"], ["r.yaml", "--set", "trainer.bf16=true", "--no-eval"]),
    (["--set", "lr=1", "--processes", "2", "r.yaml"], ["--set", "lr=1", "--processes", "2", "r.yaml"]),
    (["r.yaml", "--proceses", "2"], ["r.yaml", "--proceses", "2"]),
    (["--", "a=b"], ["--", "a=b"]),
])  # fmt: skip
def test_words_that_name_a_key_are_settings(words, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert grammar.as_settings(words, FLAGS) == expected


def test_keys_and_options_change_the_recipe(run, model):
    done = run("sft", "quickstart/sft", "--model", model, "--output", "out", "--overwrite", "--optimizer.name", "muon",
               "trainer.max_steps=3", "--set", "trainer.seed=4", "--no-eval")  # fmt: skip
    assert done.code == 0, done.err
    assert (done.recipe.model.name_or_path, done.recipe.model.init_seed) == (model, None)
    assert "ignored model.init_seed" in " ".join(done.err.split())
    assert (done.recipe.run.output_dir, done.recipe.run.overwrite) == ("out", True)
    assert (done.recipe.optimizer.name, done.recipe.eval) == ("muon", None)
    assert (done.recipe.trainer["max_steps"], done.recipe.trainer["seed"]) == (3, 4)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_run_needs_no_recipe(run, model, tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr("soren_align.launch.environment.has_gpu", lambda: has_gpu)
    faq(tmp_path / "faq.csv")
    done = run("sft", "--model", model, "--data", "faq.csv", "--output", "out", "optimizer.lr=1e-4")
    assert done.code == 0, done.err
    assert done.recipe.data.train.columns == {"instruction": "Question", "output": "Réponse"}
    assert "column 'Question' is read as the instruction, column 'Réponse' as the answer" in " ".join(done.err.split())
    assert done.recipe.optimizer.lr == 1e-4
    assert (done.recipe.trainer["bf16"], done.recipe.trainer.get("use_cpu", False)) == (has_gpu, not has_gpu)
    Path("again.yaml").write_text(recipe.to_yaml(done.recipe))
    assert recipe.load("again.yaml") == done.recipe


@pytest.mark.parametrize(("change", "message"), [
    ({"--data": "faw.csv"}, "error: --data: no file faw.csv; did you mean 'faq.csv'?"),
    ({"--data": "empty.csv"}, "error: --data: empty.csv is empty"),
    ({"--data": "wide.csv"}, "error: --data: wide.csv: is in UTF-16"),
    ({"--data": "three.csv"}, "error: --data: three.csv: found the columns a, b, c; add --question"),
    ({"--model": "./none"}, "error: --model: no folder ./none"),
    ({"data.train.columns": "{instruction: Frage}"}, "faq.csv: columns.instruction is 'Frage', but the"),
    ({"--output": None}, "error: a command without a recipe needs --model, --data and --output; add --output"),
    ({"--output": None, "--data": None, "--model": None}, "error: name a recipe, or no recipe and --model"),
])  # fmt: skip
def test_without_a_recipe_a_mistake_is_one_sentence(run, model, tmp_path, change, message):
    faq(tmp_path / "faq.csv")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "wide.csv").write_text("a,b\n", encoding="utf-16")
    (tmp_path / "three.csv").write_text("a,b,c\n1,2,3\n")
    before = sorted(tmp_path.iterdir())
    words = {"--model": model, "--data": "faq.csv", "--output": "out"} | change
    line = [
        word
        for name, value in words.items()
        if value
        for word in ([name, value] if name[0] == "-" else [f"{name}={value}"])
    ]
    refused = run("sft", *line)
    assert refused.code == 2
    assert message in [text for text in refused.err.splitlines() if "notice" not in text][-1]
    assert refused.recipe is None
    assert sorted(tmp_path.iterdir()) == before


def write_three_columns(path, names):
    rows = [f"{i},What is number {i}?,It is on shelf {i}." for i in range(60)]
    path.write_text("\n".join([names, *rows]) + "\n")


@pytest.mark.parametrize("command", [["sft", "--model", "./model", "--output", "out"], ["new", "mine"]])
@pytest.mark.parametrize(("options", "message"), [
    ([], "--data: a.csv: found the columns id, left, right; add --question COLUMN --answer COLUMN, such as --question "
     "left --answer right"),
    (["--question", "left"], "--answer: is missing; write --question COLUMN and --answer COLUMN"),
    (["--answer", "left"], "--question: is missing; write --question COLUMN and --answer COLUMN"),
    (["--question", "lefd", "--answer", "right"],
     "--data: a.csv: has the columns id, left, right, but no column 'lefd'; did you mean 'left'?"),
])  # fmt: skip
def test_sft_and_new_refuse_columns_in_the_same_words(run, model, tmp_path, command, options, message):
    write_three_columns(tmp_path / "a.csv", "id,left,right")
    refused = run(*command, "--data", "a.csv", *options)
    assert refused.code == 2
    assert refused.err.startswith(f"error: {message}")


def test_columns_of_questions_change_a_recipes_file_too_and_are_for_sft_alone(run, model, tmp_path):
    write_three_columns(tmp_path / "a.csv", "id,ask,reply")
    columns = ["--data", "a.csv", "--question", "ask", "--answer", "reply"]
    assert run("sft", "quickstart/sft", *columns).recipe.data.train.columns == {"instruction": "ask", "output": "reply"}
    refused = run("dpo", "--model", model, "--output", "out", *columns)
    assert (refused.code, refused.err) == (
        2,
        "error: --question, --answer: are for sft or kto on one file; write `columns` into the recipe's data section\n",
    )
    assert "--question" not in run("dpo", "--help").out


@pytest.mark.parametrize(("content", "kind"), [
    ("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-5\n", "a TRL config"),
    ("base_model: a/b\ndatasets: []\n", "an Axolotl file"),
    ("model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\n", "a LLaMA-Factory file"),
])  # fmt: skip
def test_another_tools_file_names_the_import(run, content, kind):
    Path("theirs.yaml").write_text(content)
    refused = run("sft", "theirs.yaml")
    assert refused.code == 2
    assert f"is {kind}, not a recipe; run `soren-align import theirs.yaml recipe.yaml`" in refused.err


@pytest.mark.parametrize(("content", "message"), [
    ("PK\3\4" + "x" * 99, "is no text, but perhaps a spreadsheet; rename the file to faq.xlsx"),
    ("Frage;Auskunft\n" + "a;b\n" * 3 + "Ja; oder?;nein\n", "record 4 has 3 columns, but the header has 2; put a text"),
    ("Frage;Auskunft\n" + "".join(f"Ist {i} offen?;Ja.\n" for i in range(30)), "all answers are equal"),
    ("Frage;Auskunft\n" + "".join(f"Ist {i} offen?;Ja {i}.\n" for i in range(19)), "has only 19 questions; write at least 20"),
    ("ID;Text\n" + "".join(f"{i};Ja, {i}.\n" for i in range(30)), "found the columns ID, Text; add --question COLUMN"),
    ("Frage\n" + "Ist geoeffnet?\n" * 30, "has only the column Frage; name a file with"),
], ids=["zip", "a column more", "one answer", "few", "no question", "one column"])  # fmt: skip
def test_new_refuses_a_damaged_file_before_it_writes(run, tmp_path, content, message):
    (tmp_path / "faq.csv").write_bytes(content.encode("latin-1"))
    refused = run("new", "mine", "--data", "faq.csv")
    assert refused.code == 2
    assert message in " ".join(refused.err.split())
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("name", [name for name in shipped.recipes() if "/stdlib" not in name])
def test_a_copied_recipe_is_merged_and_means_the_same(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/quickstart/sft/model", "runs/quickstart/sft-lora"):
        Path(folder).mkdir(parents=True)
    text = merged_text(shipped.recipes()[name])
    assert "extends:" not in text
    Path("copy.yaml").write_text(text)
    results = []
    for source in (name, "copy.yaml"):
        try:
            results.append(recipe.load(source).model_dump() | {"extends": None})
        except UserError as error:  # the data or the model of another recipe: the same sentence of both
            results.append([problem.partition(" ")[2] for problem in error.problems])
    assert results[0] == results[1]


def test_the_help_is_a_terminal_high_and_names_every_command():
    lines = grammar.HELP.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    groups = "\n".join(lines[5:-5]).replace(",", " ").split()
    commands = typer.main.get_command(app.app).commands
    assert {*commands} <= {*groups}
