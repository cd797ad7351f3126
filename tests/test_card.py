"""A stranger reads in the model card what the model is, whether it is better, and nothing of its machine."""

import json
import re

import pytest
from huggingface_hub import ModelCard
from soren_align import recipe
from soren_align.core.files import digest
from soren_align.publish.card import card, on_hub, pictures, public, public_record, write_card

from tests.support.edited_files import edited
from tests.support.run_folders import HUB, add_results, finished_run


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(in_a_folder):
    return finished_run("run", *HUB)


def front(page):
    return ModelCard(page).data.to_dict()


def test_the_front_matter_names_what_the_hub_can_link():
    page = card(finished_run("run", *HUB), "zoo")
    assert front(page) == {
        "base_model": "Qwen/Qwen2.5-0.5B", "datasets": ["HuggingFaceH4/ultrachat_200k"], "library_name": "transformers",
        "pipeline_tag": "text-generation", "tags": ["trl", "soren", "sft"],
    }  # fmt: skip
    adapter = card(finished_run("lora", *HUB, "model.lora={}", adapter_of="Qwen/Qwen2.5-0.5B"), "zoo")
    assert front(adapter)["library_name"] == "peft"
    assert front(adapter)["tags"] == ["trl", "soren", "sft", "lora"]


def test_folders_are_not_in_the_front_matter_but_the_hubs_model_beneath_them_is():
    first = finished_run("first", *HUB)
    start = str(first.model.resolve())
    run = finished_run("second", "model.name_or_path=first/model", "model.init_seed=null", start=start)
    assert front(card(run, "zoo"))["base_model"] == "Qwen/Qwen2.5-0.5B"
    run.update(data={"train": {"path": "zoo.jsonl", "split": "all", "sha256": "d" * 64, "num_kept": 9, "dropped": {}}})
    first.path.rename("moved")
    assert front(card(run, "zoo")).keys() == {"library_name", "pipeline_tag", "tags"}
    assert on_hub(str(finished_run("third").start.resolve())) is None


def test_a_merged_adapter_is_a_model_of_transformers():
    run = finished_run("run", *HUB, "model.lora={}", adapter_of="Qwen/Qwen2.5-0.5B")
    page = card(run, "zoo", merged=True)
    assert front(page)["library_name"] == "transformers"
    assert "The rounding error of the merge was not measured." in page
    assert "is saved in" not in page


@pytest.mark.parametrize(("change", "survival", "verdict"), [
    (0.0436, {"fraction_changed": 0.9, "projection": 1.0}, "Training changed the matrices by 4.36%"),
    (0.0, {"fraction_changed": 1.0, "projection": 1.0}, "**Training did not change this model"),
    (9e-5, {"fraction_changed": 1.0, "projection": 1.0}, "**Training hardly changed this model"),
    (0.01, {"fraction_changed": 0.4, "projection": 0.99}, "**Most of the change was lost to rounding"),
])  # fmt: skip
def test_a_warning_comes_first_if_training_did_not_change_the_model(change, survival, verdict):
    changed = {"relative_change": change, "aux_relative_change": change, "change_after_saving": {"dtype": "bfloat16"}}
    changed["change_after_saving"]["matrices"] = survival
    page = card(finished_run("run", training=changed), "zoo")
    first = page.split("# zoo")[1].strip().splitlines()[2]
    training = page.split("## Training\n")[1]
    assert (first if "**" in verdict else training.strip()).startswith(verdict)
    assert f"changed the matrices by {100 * change:.3g}% of their norm" in training
    assert "saved in bfloat16" in training
    is_exact = set(survival.values()) == {1.0}
    assert (f"rounding preserves {100 * survival['projection']:.3g}% of that change" in training) is not is_exact


def test_the_facts_are_those_of_run_json(run):
    page = card(run, "zoo")
    for said in (
        f"revision {'c' * 40}", f"HuggingFaceH4/ultrachat_200k (train_sft, revision {'b' * 40})",
        "958 of 960 examples, 2 dropped (an empty answer)",
        "Soren (minimax, our approximation) on 14 matrices, learning rate 0.005; ",
        "AdamW on the other parameters, learning rate 0.005", "weight_decay 0.1", "adjust_lr_fn match_rms_measured",
        "600, 64 examples each", "1 (cpu)", "float32 in training, saved in bfloat16",
        f"torch {run.read()['versions']['torch']}", "trainer 0", "Training loss 4.716 -> 0.002 (first and last log).",
    ):  # fmt: skip
        assert said in page
    assert run.recipe.read_text() in page


def test_the_card_quotes_the_held_out_loss_before_the_training_loss():
    measured = {
        "held_out": {"num_examples": 24, "evaluations": [{"step": 0, "loss": 3.97}, {"step": 600, "loss": 3.3424}]},
        "examples_per_log": [640, 320],
        "preferences": {"share": 0.75, "margin": 0.5, "num_pairs": 24, "held_out": True},
    }
    assert (
        "Held-out loss 3.970 -> 3.342 (24 examples). Training loss 4.716 -> 0.002 (first and last log, of up to 640 "
        "and 320 examples). The model prefers the chosen answer in 75% of 24 held-out pairs, margin 0.5."
    ) in card(finished_run("run", training=measured), "zoo")
    best = {"metric": "eval_loss", "value": 3.1, "step": 400}
    measured["held_out"]["evaluations"][1] = {"step": 400, "loss": 3.1}
    page = card(finished_run("best", training=measured | {"best_model": best}), "zoo")
    assert "Held-out loss 3.970 -> 3.100 at step 400 (24 examples)." in page


def test_every_source_of_a_mixture_is_named(run):
    chats = {"path": "chats.jsonl", "split": "all", "sha256": "d" * 64, "weight": 0.5}
    hub = {"path": "owner/set", "split": "train", "revision": "e" * 40, "weight": 1.0}
    run.update(data={"train": {"path": "both", "sources": [chats, hub], "num_kept": 9, "dropped": {}}})
    page = card(run, "zoo")
    assert front(page)["datasets"] == ["owner/set"]
    assert f"chats.jsonl (all, sha256 {'d' * 64}, weight 0.5); owner/set (train, revision {'e' * 40}); 9 of 9" in page


def test_the_table_has_the_base_in_its_first_row_and_comes_with_each_evaluation(run):
    write_card(run)
    assert "This model has not been evaluated." in (run.model / "README.md").read_text()
    add_results(run)
    write_card(run)
    page = (run.model / "README.md").read_text()
    rows = [line for line in page.split("## Scores")[1].splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows[:3]] == ["model", "base", "SFT"]
    assert "+80.0 [+71.1, +86.3]" in rows[2]
    assert "not been evaluated" not in page


def test_nothing_of_the_machine_is_in_card_or_manifest(tmp_path):
    run = finished_run("run")
    file = add_results(run, data=f"{tmp_path}/sets", title=f"Zoo: on the data in {tmp_path}/sets")
    assert str(tmp_path) in file.read_text()
    page = card(run, "zoo")
    assert str(tmp_path) not in page
    assert "### Zoo: on local data" in page
    assert "random weights (seed 1) with the architecture of shipped:recipes/quickstart/base" in page
    run.update(last_error=f"{tmp_path}: full")
    assert str(tmp_path) not in str(public_record(run.read(), recipe.load_resolved(run.recipe)))


@pytest.mark.parametrize(("text", "shown"), [
    ("/home/jane/My data/chat.jsonl", ".../chat.jsonl"), ("/home/jane/data/", ".../data"),
    ("/home/jane doe/x", ".../x"), ("~/x/chat.jsonl", ".../chat.jsonl"), ("~jane/chat.jsonl", ".../chat.jsonl"),
    ("../../jane/chat.jsonl", ".../chat.jsonl"), ("file:///home/jane/x", ".../x"),
    ("on the data in /home/jane/x, see /scratch/jane/y", "on the data in .../x, see .../y"),
    ("pretrained=/home/jane/x,dtype=auto", "pretrained=.../x,dtype=auto"),
    *((text, text) for text in ("owner/name", "data/chat.jsonl", "shipped:a/b", "https://hub.co/a/b", "1/2 and 3/4")),
    ("/", "/"), ({"a": ["/home/jane/x", 1, None]}, {"a": [".../x", 1, None]}),
])  # fmt: skip
def test_of_a_local_path_only_the_last_part_is_published(text, shown):
    assert public(text) == shown


def add_samples(run, suite="quickstart", response="a <b>\n| *c*", column="zoo_gen"):
    """Samples of generated text beside the results of `add_results`, whose rows then have this column too."""
    for name, text in (("base", "/home/jane/x"), ("SFT", response)):
        file = run.evaluation(suite) / "samples" / name / f"{column}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            {"doc_id": i, "task": "t", "doc": {"question": f"Which {i}?"}, "filtered_resps": [text]} for i in range(5)
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"doc_id"')
    with edited(run.evaluation(suite) / "results.json") as results:
        for row in results["rows"]:
            row["scores"][column] = {"value": 50.0, "stderr": 1.0, "n": 5}
            if "differences" in row:
                row["differences"][column] = {"value": 60.0, "low": 20.4, "high": 99.6, "p": 0.01, "p_holm": 0.01}
        results["settings"]["metrics"] = {"zoo_mc": "acc,none", column: "exact_match,strict"}


def test_the_first_lines_say_what_from_what_and_whether_it_is_better(run):
    page = card(run, "zoo")
    assert "# zoo: SFT of Qwen2.5-0.5B with Soren\n\n- **What:** A language model of 102,272 parameters.\n" in page
    assert "- **How:** Trained by SFT with Soren from Qwen/Qwen2.5-0.5B. Data: 958 examples of HuggingFaceH4/" in page
    file = add_results(run)
    add_samples(run)
    page = card(run, "zoo")
    assert "Quickstart zoo; percent, beside base, with the 95% interval of the difference\n" in page
    assert "\n  - zoo_mc: 100.0, from 20.0: +80.0 [+71.1, +86.3], better (120 questions)\n" in page
    assert "\n  - zoo_gen: 50.0, from 50.0: +60.0, too few questions (5 questions)\n" in page
    for p_holm, value, finding in ((0.06, 80.0, "not distinguishable"), (0.01, -80.0, "worse")):
        with edited(file) as results:
            results["rows"][1]["differences"]["zoo_mc"] |= {"p_holm": p_holm, "value": value}
        assert f"[+71.1, +86.3], {finding} (120 questions)" in card(run, "zoo")


def test_the_scores_of_dpo_stand_beside_those_of_its_start(run):
    file = add_results(run)
    difference = {"value": 0.0, "low": -2.3, "high": 2.3, "p": 1.0, "p_holm": 1.0}
    with edited(file) as results:
        dpo = results["rows"][1] | {"name": "DPO"}
        results["rows"][1] |= {"model": "elsewhere"}
        results["rows"].append(dpo | {"start": {"name": "SFT", "differences": {"zoo_mc": difference}}})
    page = card(run, "zoo")
    assert "beside SFT" in page
    assert "- zoo_mc: 100.0, from 100.0: +0.0 [-2.3, +2.3], not distinguishable (120 questions)" in page


def test_scores_are_in_the_front_matter_as_the_hub_reads_them(run):
    file = add_results(run)
    assert "model-index" not in card(run, "zoo")  # without a metric there is none to name
    add_samples(run)
    data = ModelCard(card(run, "zoo")).data
    assert data.model_name == "zoo"
    found = [(each.dataset_name, each.metric_type, each.metric_name, each.metric_value) for each in data.eval_results]
    assert found == [
        ("zoo_mc (Quickstart zoo)", "acc", "acc, percent", 100.0),
        ("zoo_gen (Quickstart zoo)", "exact_match", "exact_match, strict, percent", 50.0),
    ]
    assert data.eval_results[0].metric_args == {"num_questions": 120, "stderr": 0.0, "seed": 0}
    file.write_text(file.read_text().replace('"batch_size"', '"limit": 5, "batch_size"'))
    assert "model-index" not in card(run, "zoo")


def test_scores_of_a_final_run_have_their_interval_and_the_studys_declaration():
    run = finished_run("study/verdict/soren/101", *HUB, "trainer.seed=101")
    run.update(seeds={"trainer": 101, "init": None})
    file = add_results(run)
    add_samples(run)
    with edited(file) as results:
        results["rows"][1]["scores"]["zoo_mc"] |= {"value": 85.8333, "stderr": 3.1966, "low": 78.4805, "high": 90.9631}
        results["settings"]["num_fewshot"] = {"zoo_mc": 5}
    content = {"study": {}, "recipes": {}, "files": {}, "commit": None}
    declaration = file.parents[5] / "declaration.json"
    for is_edited in (False, True):
        declaration.write_text(json.dumps({"sha256": digest(content) if not is_edited else "f" * 64, **content}))
        result = ModelCard(card(run, "zoo")).data.eval_results[0]
        own = {} if is_edited else {"study_declaration": digest(content)[:12]}
        interval = {"stderr": 3.2, "low": 78.48, "high": 90.96}
        assert result.metric_args == {"num_questions": 120, "seed": 101, **interval, **own}
        assert (result.metric_value, result.dataset_args) == (85.83, {"num_few_shot": 5})


def test_three_answers_stand_beside_those_of_the_start_as_plain_text(run):
    add_results(run)
    add_samples(run)
    page = card(run, "zoo")
    assert "| prompt | base | SFT |\n|---|---|---|\n| Which 0? | .../x | a &lt;b> \\| \\*c\\* |\n" in page
    assert page.count("| .../x |") == 3
    lines = [{"step": step, "prompt": [{"role": "user", "content": "Who?"}], "completion": f"after {step}" * step}
             for step in (0, 50, 600)]  # fmt: skip
    run.samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = card(run, "zoo")
    assert "| prompt | before training | after step 600 |\n|---|---|---|\n| Who? | (empty) | after 600" in page
    assert len(page.split("| Who? |")[1].splitlines()[0]) < 300
    assert 'prompt = [{"role": "user", "content": "Who?"}]' in page


def test_pictures_are_copied_beside_the_card_and_nothing_else_is(tmp_path):
    run, png = finished_run("run", *HUB), b"\x89PNG\r\n\x1a\n"
    for suite in ("a", "b"):
        add_results(run, suite=suite)
    (run.evaluation("a") / "scores.png").write_bytes(png)
    (run.evaluation("b") / "scores.png").write_bytes(png + b"b")
    (run.evaluation("b") / "scores-dark.png").write_bytes(png)
    run.curves.write_bytes(b"no picture")
    (tmp_path / "mine.png").write_bytes(png)
    (run.evaluation("a") / "scores-dark.png").symlink_to(tmp_path / "mine.png")
    write_card(run)
    assert pictures(run).keys() == {"scores.png", "scores-2.png", "scores-2-dark.png"}
    assert (run.model / "scores-2.png").read_bytes() == png + b"b"
    page = (run.model / "README.md").read_text()
    assert '<picture><img src="scores.png" alt="Quickstart zoo" width="520"></picture>' in page
    assert '<source media="(prefers-color-scheme: dark)" srcset="scores-2-dark.png"><img src="scores-2.png"' in page
    assert "curves" not in page
    page = card(run, "zoo", repo="me/zoo", revision="a/b")
    assert re.search(r'<img src="https://\S+/me/zoo/resolve/a%2Fb/scores.png"', page)
    assert 'model="me/zoo", revision="a/b")' in page
