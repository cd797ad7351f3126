"""Studies that were run several times, side by side: answers that all give, answers that differ, what is refused."""

import json
import shutil

import numpy as np
import pytest
from soren_align.core.errors import UserError
from soren_align.study.draws import variance_components
from soren_align.study.merge import answer_sentences, merge, merged_json
from soren_align.study.study import BASE, HELD_OUT
from tests.support import command
from tests.support.study_runs import end_all, study_of

FEW = ["search.trials=1", "verdict.seeds=[101, 102, 103, 104, 105]"]


def loss_of(shift, effect):
    """The held-out losses of a study: `effect` less with soren on average, seeds 0.01 apart."""

    def loss(run):
        own = (effect + 0.004 * (run.seed * 2 % 5 - 2)) * (run.candidate == "soren")
        return 1.0 + shift * (run.seed % 2) + 0.01 * (run.seed % 5) - own

    return loss


def merged(folders, *names):
    return merge([str(folders[name]) for name in names])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Studies: soren is better in `a` and `b`, and not in `c`; others differ from `a` in run.perturb or in seeds."""
    made = {}
    for name, shift, effect, *overrides in (
        ("a", 0.0, 0.5),
        ("b", 0.02, 0.4),
        ("c", 0.0, 0.0),
        ("perturbed", 0.01, 0.5, "set.run.perturb.seed=3"),
        ("seeds", 0.0, 0.5, "verdict.seeds=[201, 202, 203, 204, 205]"),
    ):
        folder = tmp_path_factory.mktemp(name)
        study = study_of(folder, *FEW, *overrides)
        end_all(study, loss_of(shift, effect))
        made[name] = (folder / "study").rename(folder / name)
    return made


def test_an_answer_holds_only_if_every_study_gives_it(folders):
    two, three = merged(folders, "a", "b"), merged(folders, "a", "b", "c")
    (of_two,) = (each for each in two.differences if each.reference == "adamw")
    (of_three,) = (each for each in three.differences if each.reference == "adamw")
    assert (of_two.candidate, of_two.measure, of_two.answer) == ("soren", HELD_OUT, "better")
    assert [round(d.value, 6) for d in of_two.each] == [0.5, 0.4]
    assert of_three.answer is None
    assert answer_sentences(two, "adamw") == ["soren is better than adamw on held-out loss in both studies."]
    (sentence,) = answer_sentences(three, "adamw")
    assert sentence == "soren: the answers differ on held-out loss better in 2 and not distinguishable in 1."
    assert "in all 3 studies" in answer_sentences(three, BASE)[0]


def test_the_spread_over_studies_is_that_of_draws_within_seeds(folders):
    both = merged(folders, "a", "b")
    losses = [[[loss_of(*of)(run) for of in ((0.0, 0.5), (0.02, 0.4))] for run in candidate.verdict]
              for candidate in both.studies[0].candidates]  # fmt: skip
    seeds, studies = variance_components(np.array(losses))
    (spread,) = both.spreads
    assert (spread.seeds**2, spread.draws**2) == (pytest.approx(seeds), pytest.approx(studies))
    assert spread.num_draws == 2


def test_studies_that_differ_by_rounding_alone_are_merged(folders):
    both = merged(folders, "a", "perturbed")
    assert both.names == ("a", "perturbed")
    assert not both.equal


def test_a_copied_study_is_no_second_draw(folders, tmp_path):
    copy = shutil.copytree(folders["a"], tmp_path / "copy")
    assert merge([str(folders["a"]), str(copy), str(folders["b"])]).equal == (("a", "copy"),)


def test_the_command_prints_the_studies_side_by_side(folders):
    result = command.run("compare", "--merge", str(folders["a"]), str(folders["c"]))
    assert result.returncode == 0, result.stderr
    assert "+0.500 ▲" in result.stdout
    assert "+0.0000" in result.stdout
    values = json.loads(command.run("compare", "--merge", "--json", *map(str, (folders["a"], folders["c"]))).stdout)
    assert values == json.loads(json.dumps(merged_json(merged(folders, "a", "c"))))
    (of_adamw,) = (each for each in values["differences"] if each["reference"] == "adamw")
    assert of_adamw["answers"] == ["better", "not distinguishable"]
    assert of_adamw["answer"] is None


@pytest.mark.parametrize(("names", "finding"), [
    (["a"], "write the folders of two or more different studies"),
    (["a", "a"], "write the folders of two or more different studies"),
    (["a", "seeds"], "differs from the study in .*verdict.seeds"),
])  # fmt: skip
def test_what_cannot_be_merged_is_refused(folders, names, finding):
    with pytest.raises(UserError, match=f"(?s){finding}"):
        merged(folders, *names)


def test_a_folder_without_a_verdict_is_refused(folders, tmp_path):
    with pytest.raises(UserError, match="is no study's folder"):
        merge([str(folders["a"]), str(tmp_path)])
    broken = shutil.copytree(folders["b"], tmp_path / "b")
    metrics = broken / "verdict" / "soren" / "101" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"relative_change": 0.1', '"relative_change": 0.2'))
    with pytest.raises(UserError, match=r"has no verdict \(.*\), so it cannot be merged"):
        merge([str(folders["a"]), str(broken)])


def test_several_studies_need_the_option(folders):
    result = command.run("compare", str(folders["a"]), str(folders["b"]))
    assert result.returncode == 2
    assert "add --merge" in result.stderr
