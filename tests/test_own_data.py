"""docs/own-data.md: its commands run in the folder of `soren-align new`, its recipe is that folder's."""

import contextlib
import csv
import json
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import openpyxl
import pytest
import yaml
from soren_align import recipe
from soren_align.cli.questions import read_data
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.data import load_split
from soren_align.evaluate.suite.suites import load_suite
from soren_align.evaluate.suite.tasks import load_tasks

from tests.support import command
from tests.support.conversations import split
from tests.support.tiny_models import make_reader

PAGE = Path(__file__).resolve().parent.parent / "docs/own-data.md"
TEXT = PAGE.read_text(encoding="utf-8")
INDENTED = re.compile(r"^(?:    .*\n|\n(?=    ))+", re.MULTILINE)
BLOCKS = INDENTED.findall(re.sub(r"^```.*?^```\n", "", TEXT, flags=re.DOTALL | re.MULTILINE))
COMMANDS = [line.strip() for block in BLOCKS for line in block.splitlines() if line.startswith("    soren-align")]
NEW = shipped.ROOT / "configs/new"


def words(text):
    return " ".join(text.split())


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The outputs of the page's commands, in its order, and the folder."""
    folder = tmp_path_factory.mktemp("own")
    rows = [f"What is in room {number}?,Books about subject {number}." for number in range(60)]
    (folder / "faq").mkdir()
    (folder / "faq/faq.csv").write_text("\n".join(["question,answer", *rows]), encoding="utf-8")
    texts = []
    with contextlib.chdir(folder):
        for number, line in enumerate(COMMANDS):
            result = command.run(*shlex.split(line)[1:], cwd=("faq", None)[number] if number < 2 else "mine", code=0)
            texts.append(result.stdout + result.stderr)
    return SimpleNamespace(texts=texts, folder=folder / "mine")


@pytest.mark.rest
@pytest.mark.model
def test_every_command_of_the_page_prints_what_it_shows(outputs):
    assert len(COMMANDS) == 10
    printed = words("\n".join(outputs.texts))
    shown = [block for block in BLOCKS if "soren-align" not in block]
    assert len(shown) == 2
    for part in re.split(r"\n\n|\n *\.\.\.\n", "\n\n".join(shown)):
        assert words(part) in printed


@pytest.mark.rest
@pytest.mark.model
def test_the_sentence_over_the_table_is_true_of_the_answers(outputs):
    samples, counts = outputs.folder / "runs/sft/eval/questions/samples", {}
    for row in ("base", "SFT"):
        answers = read(samples / row / "trained.jsonl")
        right = [a["filtered_resps"][0].strip().casefold() == a["doc"]["answer"].casefold() for a in answers]
        assert [bool(a["matched_by"]) for a in answers] == right
        counts[row] = sum(right)
    assert counts["base"] == 0
    assert counts["SFT"] >= 7  # of 8, which are trained 40 times
    sentence = f"SFT is right on {counts['SFT']} of 8 trained questions (before: 0, too few to judge), "
    printed = [words(text) for text in outputs.texts]
    assert sum(sentence in text for text in printed) == 2  # of `sft` and `eval`
    assert (
        "answers evenly spaced questions of rephrased, before and after When does the library open? base:" in printed[3]
    )


@pytest.mark.rest
@pytest.mark.model
def test_the_dpos_results_compare_it_with_the_sft_too(outputs):
    results = json.loads((outputs.folder / "runs/dpo/eval/questions/results.json").read_text())
    base, sft, dpo = results["rows"]
    assert (base.get("start"), sft.get("start"), dpo["start"]["name"]) == (None, None, "SFT")
    for column, difference in dpo["start"]["differences"].items():
        assert difference["value"] == dpo["scores"][column]["value"] - sft["scores"][column]["value"]
        assert difference["p_holm"] >= difference["p"]
    assert results["settings"]["task_versions"] == {}
    assert "DPO minus SFT, its start" in (outputs.folder / "runs/dpo/eval/questions/table.md").read_text()


@pytest.mark.model
def test_a_training_without_a_recipe_ends_with_the_loss_before_and_after_and_the_way_to_scores(tmp_path):
    make_reader(tmp_path / "base", chat_template=True)
    rows = [f"{i},What is in room {i}?,Books about subject {i}." for i in range(40)]
    (tmp_path / "faq.csv").write_text("\n".join(["id,ask,reply", *rows]))
    columns = ("--question", "ask", "--answer", "reply")
    options = ("--model", "base", "--data", "faq.csv", *columns, "--output", "runs/faq", "trainer.max_steps=2")
    done = command.run("sft", *options, cwd=tmp_path, code=0)
    record = json.loads((tmp_path / "runs/faq/run.json").read_text())["training"]["held_out"]
    before, after = record["evaluations"]
    assert (before["step"], after["step"]) == (0, 2)
    losses = f"{before['loss']:.3f} before training, {after['loss']:.3f} after it"
    num = record["num_examples"]
    ending = f"result held-out loss {losses}, on {num} examples that were not trained on done"
    assert ending in " ".join(done.stderr.split())
    path = f"soren-align new NAME --model base --data faq.csv {' '.join(columns)}\n"
    assert done.stderr.endswith(f"next      soren-align chat runs/faq --compare start\n          {path}")


def test_the_recipe_of_the_page_is_that_of_new():
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert block == (NEW / "sft.yaml").read_text()


def test_examples_and_questions_of_the_page_can_be_read(tmp_path):
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    chat, alpaca, trained, rephrased, held_out, pair = "".join(blocks).splitlines(keepends=True)
    for task, text in (("sft", chat), ("sft", alpaca), ("dpo", pair)):
        (tmp_path / "my.jsonl").write_text(text)
        assert len(load_split(split(tmp_path / "my.jsonl"), task).dataset) == 1
    assert chat in (NEW / "chat.jsonl").read_text()
    assert pair in (NEW / "pairs.jsonl").read_text()
    for column, text in (("trained", trained), ("rephrased", rephrased), ("preference", held_out)):
        assert text in (NEW / f"questions/{column}/test.jsonl").read_text()


def test_the_general_questions_have_four_choices_in_balanced_places():
    questions = read(NEW / "questions/general/test.jsonl")
    places = [question["choices"].index(question["answer"]) for question in questions]
    assert [places.count(i) for i in range(4)] == [10] * 4
    assert {len({*question["choices"]}) for question in questions} == {4}


FAQ = [(f"What is in room {i}?", f"1. Books about {i}.\n2. Maps of {i}.") for i in range(30)]
VARIANTS = [
    (q, f"Gate {i} opens at {i}.")
    for i in range(9)
    for q in (
        f"When does gate {i} open?",
        f"Gate {i}: from when can I enter?",
        f"Could you name the opening hour of gate {i}?",
    )
]
SAME = [
    (f"What colour is model {word}?", "It comes in black and silver.") for word in ("Primo", "Duo", "Tre", "Quarto")
]
LABELS = [
    (f"The {word} number {i} is fine.", ("good", "bad", "neutral")[i % 3]) for i, word in enumerate(["lamp"] * 60)
]
NAMES = [
    (f"Who called? {first} {i} called about the lamp.", f"{first} {i}") for i in range(20) for first in ("Anna", "Ben")
]
CHATS = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}, *more]} for i, (q, a) in
         enumerate(FAQ) for more in [[{"role": "user", "content": "Thanks"}] * (i % 2)]]  # fmt: skip


def write_csv(path, head, rows):
    with path.open("w", encoding="utf-8-sig", newline="") as stream:
        csv.writer(stream, delimiter=";").writerows([head, *rows])


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def new(tmp_path, data, *options):
    """The columns of the suite with their questions, the examples, and what was printed."""
    done = command.run("new", "mine", "--data", data, *options, cwd=tmp_path, code=0)
    folder = tmp_path / "mine"
    columns = {task.column: read(folder / f"questions/{task.column}/test.jsonl") for task in
               load_suite(folder / "questions").tasks}  # fmt: skip
    return columns, read(folder / "chat.jsonl"), " ".join(done.stderr.split())


@pytest.mark.parametrize(("rows", "sizes", "num_trained"), [
    (FAQ, {"trained": 30}, 30),
    (VARIANTS, {"trained": 18, "rephrased": 9}, 18),
    (FAQ + SAME, {"trained": 34}, 34),  # one answer, but the questions differ in one place
    (LABELS, {"trained": 40, "held-out": 20}, 40),
    (NAMES, {"trained": 26, "held-out": 14, "choice": 14}, 26),
    ([(f"Order {i}: {i} mugs.", f'{{"count": {i}}}') for i in range(40)], {"trained": 26, "held-out": 14, "choice": 14}, 26),
], ids=["FAQ", "variants", "template", "labels", "extraction", "JSON"])  # fmt: skip
def test_the_test_follows_from_what_the_file_is(tmp_path, rows, sizes, num_trained):
    write_csv(tmp_path / "my.csv", ["question", "answer"], rows)
    columns, examples, _ = new(tmp_path, "my.csv")
    assert {column: len(each) for column, each in columns.items()} == sizes
    trained = {(example["instruction"], example["output"]) for example in examples}
    assert len(trained) == num_trained
    for column, questions in columns.items():
        for question in questions:
            pair = (question["question"], question["answer"])
            assert pair in rows
            assert (pair in trained) == (column == "trained")
    if rows is LABELS:  # each label has its share
        assert sorted(Counter(question["answer"] for question in columns["held-out"]).values()) == [6, 7, 7]
    for question in columns.get("rephrased", ()):
        assert question["answer"] in {answer for _, answer in trained}
    for question in columns.get("choice", ()):
        assert question["choices"].count(question["answer"]) == 1
        assert len({*question["choices"]}) == 4


def test_a_kind_can_be_chosen_and_a_longest_answer_has_room(tmp_path):
    write_csv(tmp_path / "my.csv", ["question", "answer"], [*FAQ, ("What is upstairs?", "Maps. " * 90)])
    columns, examples, printed = new(tmp_path, "my.csv", "--kind", "behaviour")
    assert (len(columns["held-out"]), len(examples)) == (11, 20)
    assert "held-out: 11 questions are too few for confidence intervals, which need 20" in printed
    task = yaml.safe_load((tmp_path / "mine/questions/trained.yaml").read_text())
    assert task["generation_kwargs"] == {"until": [], "max_gen_toks": 6 * 90 - 1 + 32}
    assert yaml.safe_load((tmp_path / "mine/sft.yaml").read_text())["trainer"]["max_length"] == 640


def test_a_column_of_other_wordings_is_asked_and_not_trained(tmp_path):
    rows = [(q, a, f"Tell me about {i}" * (i < 3)) for i, (q, a) in enumerate(FAQ)]
    write_csv(tmp_path / "my.csv", ["Frage", "Antwort", "Umformuliert"], rows)
    columns, examples, printed = new(tmp_path, "my.csv")
    assert columns["rephrased"] == [{"question": f"Tell me about {i}", "answer": FAQ[i][1]} for i in range(3)]
    assert [example["instruction"] for example in examples] == [q for q, _ in FAQ]
    assert "'Umformuliert' as other wordings" in printed
    # Of one skill, those of trained questions alone; of pairs none, and it is said.
    shutil.rmtree(tmp_path / "mine")
    write_csv(tmp_path / "my.csv", ["Frage", "Antwort", "Rephrased"], [(q, a, f"{q} Now?") for q, a in LABELS])
    columns, examples, _ = new(tmp_path, "my.csv")
    trained = {example["instruction"] for example in examples}
    assert {each["question"].removesuffix(" Now?") for each in columns["rephrased"]} == trained
    shutil.rmtree(tmp_path / "mine")
    write_csv(tmp_path / "my.csv", ["Frage", "gut", "schlecht", "Rephrased"], [(q, a, "No.", "?") for q, a in FAQ])
    assert "not read: Rephrased" in new(tmp_path, "my.csv")[2]


@pytest.mark.parametrize(("rows", "epochs"), [(FAQ, 20), (LABELS, 3)], ids=["facts", "labels"])
def test_a_pretrained_model_gets_the_steps_that_facts_need(tmp_path, rows, epochs):
    write_csv(tmp_path / "my.csv", ["question", "answer"], rows)
    new(tmp_path, "my.csv", "--model", "some/model")
    made = recipe.load(str(tmp_path / "mine/sft.yaml"), [])
    assert made.trainer["num_train_epochs"] == epochs
    assert (made.model.lora is not None, made.optimizer.lr) == ((True, 1e-3) if epochs == 20 else (False, 2e-5))


@pytest.mark.parametrize(("head", "order"), [
    (("Kategorie", "Nachricht"), -1),
    (("Frage", "Antwort"), 1), (("Antwort", "Frage"), -1), (("réponse courte", "Question"), -1), (("A", "B"), 1),
    (("B", "A"), 1), (("Begriff", "Erklärung"), 1), (("质量", "问题"), -1),
])  # fmt: skip
def test_the_side_of_the_questions_is_found_by_names_and_question_marks(tmp_path, head, order):
    write_csv(tmp_path / "my.csv", head, [pair[::order] for pair in FAQ])
    _, examples, printed = new(tmp_path, "my.csv")
    assert examples[0] == dict(zip(("instruction", "output"), FAQ[0], strict=True))
    question, answer = head[::order]
    assert f"my.csv: column '{question}' as the question, '{answer}' as the answer" in printed


def test_new_names_what_it_leaves_out(tmp_path):
    write_csv(
        tmp_path / "my.csv", ["Nr", "Frage", "Antwort"], [(1, *FAQ[0]), (2, "Et alors ?", ""), *((3, *p) for p in FAQ)]
    )
    printed = new(tmp_path, "my.csv")[2]
    assert "as the answer; not read: Nr" in printed
    assert "left out, because a cell is empty: record 2" in printed
    assert "left out, because the question occurs before: 1 record" in printed
    waiting = read(tmp_path / "mine/questions/rephrased/test.jsonl")
    assert waiting[0] == {"question": None, "original": FAQ[0][0], "answer": FAQ[0][1]}
    suite = tmp_path / "mine/questions/suite.yaml"
    suite.write_text(suite.read_text().replace("  # - {task: rephrased", "  - {task: rephrased"))
    with pytest.raises(UserError, match=r"rephrased/test.jsonl:1: the question has no 'question'"):
        load_tasks(load_suite(suite))


def test_dates_are_asked_as_they_are_written(tmp_path):
    """pyarrow reads a column of texts that are all dates as timestamps: no answer would be right."""
    dates = [(question, f"2004-10-{day + 1:02}") for day, (question, _) in enumerate(FAQ)]
    write_csv(tmp_path / "my.csv", ["codename", "release"], dates)
    new(tmp_path, "my.csv", "--question", "codename", "--answer", "release")
    (task,) = load_tasks(load_suite(tmp_path / "mine/questions")).values()
    assert [task.doc_to_target(doc) for doc in task.test_docs()] == [date for _, date in dates]
    shutil.rmtree(tmp_path / "mine")
    options = ("--question", "codename", "--answer", "release", "--kind", "behaviour")
    columns, _, _ = new(tmp_path, "my.csv", *options)
    task = load_tasks(load_suite(tmp_path / "mine/questions"))["choice"]  # lists of dates
    assert [task.doc_to_choice(doc) for doc in task.test_docs()] == [each["choices"] for each in columns["choice"]]


def test_conversations_are_all_trained_and_pairs_are_held_out(tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    columns, examples, _ = new(tmp_path, "chats.jsonl")
    assert examples == CHATS
    assert columns == {"trained": [{"question": q, "answer": a} for q, a in FAQ]}
    shutil.rmtree(tmp_path / "mine")
    system = {"from": "system", "value": "You sell lamps."}
    theirs = [{"conversations": [system] * (i % 2) + [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
              for i, (q, a) in enumerate(FAQ)]  # fmt: skip
    (tmp_path / "theirs.json").write_text(json.dumps(theirs))
    asked = new(tmp_path, "theirs.json")[0]["trained"]
    systems = ["You sell lamps." * (i % 2) for i in range(len(FAQ))]
    assert asked == [{"question": q, "answer": a, "system": s} for (q, a), s in zip(FAQ, systems, strict=True)]
    (task,) = load_tasks(load_suite(tmp_path / "mine/questions")).values()
    prompts = [json.loads(task.fewshot_context(doc, 0, apply_chat_template=True, chat_template=messages))
               for doc in task.test_docs()]  # fmt: skip
    assert prompts == [[{"role": "system", "content": s}] * bool(s) + [{"role": "user", "content": q}]
                       for (q, _), s in zip(FAQ, systems, strict=True)]  # fmt: skip
    shutil.rmtree(tmp_path / "mine")
    rows = [(prompt, f"Sorry, {i}.", "So what.") for i, (prompt, _) in enumerate(FAQ)]
    write_csv(
        tmp_path / "pairs.csv", ["Frage", "gute Antwort", "schlechte Antwort"], [*rows, ("Really?", "Yes.", "Yes.")]
    )
    columns, _, printed = new(tmp_path, "pairs.csv")
    pairs = read(tmp_path / "mine/pairs.jsonl")
    assert (len(pairs), len(columns["preference"])) == (20, 10)
    both = [
        *((p["instruction"], p["chosen"], p["rejected"]) for p in pairs),
        *(tuple(p.values()) for p in columns["preference"]),
    ]
    assert sorted(both) == sorted(rows)
    assert "left out, because both answers are equal: 1 record" in printed
    assert len(load_split(split(tmp_path / "mine/pairs.jsonl"), "dpo").dataset) == 20


def messages(turns, add_generation_prompt=True):
    """A chat template that shows what a model is asked."""
    return json.dumps(turns)


@pytest.mark.parametrize(("record", "message"), [
    ({"messages": ["Hi"]}, "record 1, 'messages': is no list of turns; write"),
    ({"messages": None}, "record 1, 'messages': is no list of turns; write"),
    ({"messages": [{"role": "user", "content": "Hi"}]}, "no conversation begins with a question and its answer"),
    ({"prompt": "Hi", "chosen": [{"content": "a"}] * 3, "rejected": "b"}, "record 1, 'chosen': is no text, nor one"),
    ({"question": {}, "answer": "a"}, "record 1, 'question': is no text, nor one question and its answer"),
    (None, "my.jsonl: is empty; name a file"),
])  # fmt: skip
def test_new_refuses_what_it_cannot_ask(tmp_path, record, message):
    (tmp_path / "my.jsonl").write_text(f"{json.dumps(record)}\n" * 30 if record else "")
    refused = command.run("new", "mine", "--data", "my.jsonl", cwd=tmp_path, code=2)
    assert message in refused.stderr
    assert not (tmp_path / "mine").exists()


def test_a_file_of_a_german_spreadsheet_is_read_as_windows_1252(tmp_path):
    rows = [f"Wie schwer ist Gerät {i}?;Es wiegt {i} kg und kostet {i} €." for i in range(30)]
    (tmp_path / "my.csv").write_bytes("\n".join(["Frage;Antwort", *rows]).encode("cp1252"))
    _, examples, printed = new(tmp_path, "my.csv")
    assert examples[7] == {"instruction": "Wie schwer ist Gerät 7?", "output": "Es wiegt 7 kg und kostet 7 €."}
    assert "not UTF-8: read as Windows-1252, such as 'Wie schwer ist Gerät 0?'" in printed


def test_a_spreadsheet_is_read_and_a_damaged_one_or_two_sheets_are_refused(tmp_path):
    book = openpyxl.Workbook()
    for row in [("Frage", "Antwort", None), *FAQ, (None, None)]:
        book.active.append(row)
    book.save(tmp_path / "my.xlsx")
    assert len(new(tmp_path, "my.xlsx")[1]) == 30
    book.create_sheet("Notes").append(("a",))
    book.save(tmp_path / "noted.xlsx")
    shutil.rmtree(tmp_path / "mine")
    assert "read sheet 'Sheet'; not read: Notes" in new(tmp_path, "noted.xlsx")[2]
    for i in range(30):
        book["Notes"].append((i,))
    book.save(tmp_path / "two.xlsx")
    (tmp_path / "broken.xlsx").write_bytes((tmp_path / "my.xlsx").read_bytes()[:999])
    for name, message in (
        ("two", "has 2 sheets with rows: Sheet, Notes"),
        ("broken", "is no spreadsheet that can be read"),
    ):
        refused = command.run("new", name, "--data", f"{name}.xlsx", cwd=tmp_path, code=2)
        assert f"{name}.xlsx: {message}" in refused.stderr
        assert not (tmp_path / name).exists()


def test_new_writes_into_new_or_empty_folders_only(tmp_path):
    (tmp_path / "empty").mkdir()
    command.run("new", "empty", cwd=tmp_path, code=0)
    names = {file.name for file in (tmp_path / "empty").iterdir()}
    assert names == {file.name for file in NEW.iterdir()} - {"kto.yaml"} | {"recipe.schema.json"}
    again = command.run("new", "empty", cwd=tmp_path, code=2)
    assert again.stdout == ""
    assert "empty: exists already; name a new folder, or an empty one" in again.stderr
    assert "no: there is no such folder" in command.run("new", "no/where", cwd=tmp_path, code=2).stderr


def test_a_copied_suite_works_from_any_folder(tmp_path):
    copied = command.run("suites", "copy", "quickstart", "mine", cwd=tmp_path)
    assert "run soren-align eval RUN --suite mine" in copied.stdout
    suite = load_suite(tmp_path / "mine")
    assert [task.column for task in suite.tasks] == ["zoo_mc", "zoo_gen", "preference"]
    assert suite.data_folder() == shipped.suites()["quickstart"].parents[2] / "recipes/quickstart/data"
    refused = command.run("suites", "copy", "quikstart", "other", cwd=tmp_path)
    assert "did you mean 'quickstart'?" in refused.stderr
    assert "name of a shipped suite" in command.run("suites", "copy", "quickstart", "quickstart", cwd=tmp_path).stderr


@pytest.mark.parametrize("has_gpu", [True, False])
def test_recipes_for_a_model_of_ones_own_load_and_train_it_on_a_gpu_if_there_is_one(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr("soren_align.launch.environment.has_gpu", lambda: has_gpu)
    done = command.run("new", "mine", "--model", "some/model: 0.5B", cwd=tmp_path)
    assert (done.returncode, "no GPU, so the recipes train on the CPU" in done.stderr) == (0, not has_gpu)
    monkeypatch.chdir(tmp_path / "mine")
    sft = recipe.load("sft.yaml")
    assert (sft.model.name_or_path, sft.model.init_seed) == ("some/model: 0.5B", None)
    assert (sft.optimizer.lr, sft.optimizer.aux_lr, sft.trainer["num_train_epochs"]) == (2e-5, 2e-5, 3)
    dpo = yaml.safe_load(Path("dpo.yaml").read_text())
    assert dpo["model"] == {"name_or_path": "runs/sft/model"}
    assert (dpo["optimizer"]["lr"], dpo["trainer"]["num_train_epochs"]) == (5e-7, 1)
    for trainer in (sft.trainer, dpo["trainer"]):
        assert (trainer["bf16"], trainer.get("use_cpu", False)) == (has_gpu, not has_gpu)


THUMBS = [
    (f"What is in room {i}?", answer, thumb)
    for i in range(30)
    for answer, thumb in ((f"Books about {i}.", "👍"), (f"No idea, {i}?", "👎"))[: 1 + i % 3]
]


@pytest.fixture
def thumbs(tmp_path):
    with (tmp_path / "thumbs.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([("Question", "Reply", "Feedback", "Page"), *((*row, "a") for row in THUMBS)])
    return tmp_path / "thumbs.csv"


def test_thumbs_become_examples_for_sft_and_kto_and_a_test_of_other_prompts(tmp_path, thumbs):
    result = command.run("new", "mine", "--data", "thumbs.csv", cwd=tmp_path, code=0)
    told = words(result.stdout + result.stderr)
    assert (
        "column 'Question' as the question, 'Reply' as the answer, 'Feedback' as thumbs up or down; not read: Page"
        in told
    )
    folder = tmp_path / "mine"
    rows = {name: [json.loads(line) for line in (folder / name).read_text().splitlines()]
            for name in ("chat.jsonl", "thumbs.jsonl", "thumbs_test.jsonl")}  # fmt: skip
    judged = {row["prompt"] for row in rows["thumbs_test.jsonl"]}
    trained = {row["prompt"] for row in rows["thumbs.jsonl"]}
    assert not judged & trained
    assert judged | trained == {row[0] for row in THUMBS}
    everything = {(row["prompt"], row["completion"], row["label"])
                  for name in ("thumbs.jsonl", "thumbs_test.jsonl") for row in rows[name]}  # fmt: skip
    assert everything == {(question, answer, thumb == "👍") for question, answer, thumb in THUMBS}
    assert {row["instruction"] for row in rows["chat.jsonl"]} == trained  # each prompt has a good answer
    assert all(row["output"].startswith("Books") for row in rows["chat.jsonl"])
    assert not (folder / "dpo.yaml").exists()
    with contextlib.chdir(folder):
        loaded = recipe.load("kto.yaml", ["model.name_or_path=org/model"])
    assert loaded.trainer["desirable_weight"] == 1.0
    bad = sum(thumb == "👎" for *_, thumb in THUMBS)
    assert loaded.trainer["undesirable_weight"] == pytest.approx(30 / bad, abs=0.01)


def test_questions_with_several_good_answers_are_trained_and_not_asked(tmp_path, thumbs):
    with thumbs.open("a", newline="") as stream:
        csv.writer(stream).writerows([(f"What is in room {i}?", f"Also maps of {i}.", "👍", "a") for i in range(12)])
    command.run("new", "mine", "--data", "thumbs.csv", cwd=tmp_path, code=0)
    chat, asked = (
        [json.loads(line) for line in (tmp_path / "mine" / name).read_text().splitlines()]
        for name in ("chat.jsonl", "questions/trained/test.jsonl")
    )
    numbers = Counter(row["instruction"] for row in chat)
    assert {2, 1} == {*numbers.values()}
    assert {row["question"] for row in asked} == {question for question, number in numbers.items() if number == 1}


def test_a_column_of_yes_and_no_is_no_thumb(tmp_path):
    rows = [
        ("question", "answer", "active"),
        *((f"What is {i}?", f"It is {i}.", "yes" if i % 2 else "no") for i in range(40)),
    ]
    with (tmp_path / "faq.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
    own = read_data(str(tmp_path / "faq.csv"), None, None)
    assert not own.thumbs
    assert "not read: active" in own.read_as


@pytest.mark.parametrize("task", ["sft", "kto"])
def test_a_training_without_a_recipe_finds_the_thumbs_or_warns(task, tmp_path, thumbs):
    notices = []
    options = {"--model": "org/model", "--data": str(thumbs), "--output": str(tmp_path / "run")}
    loaded = recipe.load(None, [], task, notices.append, options, (None, None))
    columns = {"instruction": "Question", "output": "Reply"}
    if task == "kto":
        assert loaded.data.train.columns == {**columns, "label": "Feedback"}
        assert any("column 'Feedback' as its label" in notice for notice in notices)
    else:
        assert loaded.data.train.columns == columns
        assert any("it trains bad answers like good ones. To learn from both" in notice for notice in notices)


@pytest.mark.parametrize(("labels", "shown"), [(("5", "2"), "5, 2"), (("👍", "👍"), "👍")])
def test_stars_and_one_kind_of_thumbs_are_one_sentence(tmp_path, thumbs, labels, shown):
    text = thumbs.read_text().replace("👍", labels[0]).replace("👎", labels[1])
    thumbs.write_text(text)
    options = {"--model": "org/model", "--data": str(thumbs), "--output": str(tmp_path / "run")}
    message = f"column 'Feedback' has {shown}, but kto needs labels of both kinds"
    with pytest.raises(UserError, match=re.escape(message)):
        recipe.load(None, [], "kto", lambda notice: None, options, (None, None))


def test_conversations_with_thumbs_are_left_to_kto(tmp_path):
    turns = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"id": i, "messages": turns, "label": bool(i % 2)} for i in range(30)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="has conversations with thumbs in 'label'"):
        read_data(str(tmp_path / "chats.jsonl"), None, None)


@pytest.mark.parametrize(("up", "down", "shown"), [("5", "2", "'5', '2'"), ("👍", "", "'👍', ''")])
def test_a_rating_that_is_no_thumb_is_no_reason_to_train_bad_answers(tmp_path, thumbs, up, down, shown):
    thumbs.write_text(thumbs.read_text().replace("👍", up).replace("👎", down))
    with pytest.raises(UserError) as error:
        read_data(str(thumbs), None, None)
    assert "column 'Feedback' looks like a rating, but has" in str(error.value)
    assert all(value in str(error.value) for value in shown.split(", "))


@pytest.mark.parametrize(("up", "down"), [("👍🏽", "👎🏿"), ("thumbs_up", "Thumbs_Down"), ("positive", "negative")])
def test_thumbs_of_any_tone_are_read_and_a_few_other_words_left_out(tmp_path, thumbs, up, down):
    text = thumbs.read_text().replace("👍", up).replace("👎", down)
    thumbs.write_text(text + 'What now?,"Wait, please.",n/a,b\n')
    own = read_data(str(thumbs), None, None)
    assert {(q, a, good) for q, each in own.thumbs.items() for a, good in each} == {
        (question, answer, thumb == "👍") for question, answer, thumb in THUMBS
    }
    assert any("because a cell is empty or no thumb: record" in notice for notice in own.notices)


def test_only_liked_answers_are_a_faq(thumbs):
    lines = [line for line in thumbs.read_text().splitlines() if "👎" not in line]
    thumbs.write_text("\n".join(lines))
    own = read_data(str(thumbs), None, None)
    assert not own.thumbs
    assert len(own.pairs) == 30


def test_columns_with_other_names_are_asked_for_beside_the_thumbs(thumbs):
    thumbs.write_text(thumbs.read_text().replace("Question,Reply", "Customer wrote,Bot wrote"))
    with pytest.raises(UserError, match=r"add --question COLUMN --answer COLUMN.*\('Feedback' is read as thumbs\)"):
        read_data(str(thumbs), None, None)
    assert len(read_data(str(thumbs), "Customer wrote", "Bot wrote").thumbs) == 30
