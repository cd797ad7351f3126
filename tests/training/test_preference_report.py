"""Sentences about a DPO run: true ones, and only where they matter."""

import pytest
from soren_align.launch.show import show
from soren_align.run.preferences import describe_preferences, sample_changes

FALL = {"chosen": -2.5, "rejected": -10.0}
NORMAL = "This is normal in DPO; it is a concern if sampled answers become longer, repeat themselves or make no sense"


def training(changes, loss_type=("sigmoid",), samples=None):
    preferences = {"log_probability_changes": changes, "loss_type": list(loss_type)}
    return {"preferences": preferences} | ({"samples": samples} if samples else {})


@pytest.mark.parametrize(("changes", "sentence"), [
    (FALL, f"fell by 2.5 on average, that of the rejected ones by 10. {NORMAL}. If this is a concern, try "
          "trainer.loss_type: [sigmoid, sft]"),
    ({"chosen": -2.5, "rejected": -1},
     "fell by 2.5 on average, that of the rejected ones by 1. The model has not learned the preference: check the "
     "labels, or lower the learning rate"),
    ({"chosen": -2.5, "rejected": 1}, "that of the rejected ones rose by 1. The model has not"),
])  # fmt: skip
def test_a_fall_of_the_chosen_answers_is_one_sentence(changes, sentence):
    (text,) = describe_preferences(training(changes))
    assert text.startswith("the log-probability of the chosen answers fell by 2.5 on average, ")
    assert sentence in text
    assert ("loss_type" in text) == ("loss_type" in sentence)


@pytest.mark.parametrize("changes", [{"chosen": 1, "rejected": -10},
                                 {"chosen": -0.001, "rejected": -10},
                                 {"chosen": float("nan"), "rejected": float("nan")}])  # fmt: skip
def test_no_fall_is_no_sentence(changes):
    assert describe_preferences(training(changes)) == []
    assert describe_preferences({}) == []


def line(step, prompt, completion, **marks):
    return {"step": step, "prompt": prompt, "completion": completion, "finish_reason": "stop", **marks}


def test_samples_are_compared_by_prompt_from_the_start_to_the_end():
    chat = [{"role": "user", "content": "Hi"}]
    lines = [line(0, "a", "One two."), line(0, chat, "Three."), line(5, "a", "?"), line(5, chat, "?")]
    lines += [line(9, "a", "x " * 20, at="end"), line(9, chat, "x " * 40, at="end")]
    assert sample_changes(lines) == {"num_prompts": 2, "characters": [7.0, 60.0],
                                     "repeated": [0.0, pytest.approx((16 / 17 + 36 / 37) / 2)]}  # fmt: skip
    assert sample_changes(lines[:2]) == sample_changes(lines[2:]) == sample_changes(lines[:3]) == {}
    texts = describe_preferences(training({"chosen": 10, "rejected": 0}, samples=sample_changes(lines)))
    assert texts == [
        "the sampled answers to 2 prompts became longer: from 7 to 60 characters on average",
        "the sampled answers to 2 prompts repeat themselves: 96% of their sequences of 4 words are repeated, 0% at the "
        "start. If this is a concern, try trainer.loss_type: [sigmoid, sft]",
    ]
    unchanged = [line(0, "a", "One two three."), line(9, "a", "Four two three.")]
    assert describe_preferences({"samples": sample_changes(unchanged)}) == []


@pytest.mark.rest
def test_the_changes_are_those_of_the_held_out_log_probabilities(tiny_run, capsys, monkeypatch):
    keys = ("trainer.eval_strategy=steps", "trainer.eval_on_start=true", "trainer.eval_steps=3", "data.eval.limit=32")
    run = tiny_run("dpo", *keys, "run.samples={prompts: [Hi], max_new_tokens: 3}", "trainer.max_steps=3")
    assert run.train()
    logs = [log for log in run.metrics() if "eval_loss" in log]
    result = run.folder.record()["training"]
    for answer, change in result["preferences"]["log_probability_changes"].items():
        key = f"eval_logps/{answer}"
        assert change == pytest.approx(logs[-1][key] - logs[0][key], abs=1e-3)
        assert abs(change) > 1e-3
    assert result["samples"]["num_prompts"] == 1
    record = run.folder.record()
    record["training"]["preferences"]["log_probability_changes"] = {"chosen": -2.5, "rejected": -10.0}
    run.folder.update(training=record["training"], status="finished")
    monkeypatch.setenv("COLUMNS", "400")
    show(str(run.folder))
    assert capsys.readouterr().out.count("the chosen answers fell by 2.5 on average, that of the rejected ones by") == 1
