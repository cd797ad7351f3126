"""The report of a study: nothing from outside, nothing of a run's texts as code."""

import base64
import csv
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from unittest import mock

import pytest
from matplotlib.figure import Figure as Drawing
from PIL import Image
from rich.console import Console
from soren_align.core.figures import LIGHT, line_style
from soren_align.study.report import figures
from soren_align.study.report.curves import focus, mean_curve, shown_runs
from soren_align.study.report.figures import search_figure, set_scale
from soren_align.study.report.page import terminal_verdict, trials_csv, write_report
from soren_align.study.report.text import comparisons, headline, signed_size, size
from soren_align.study.study import Candidate, Point, Run, Study
from tests.support.report_study import COLUMNS, difference, make_study

HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "=cmd|'/c calc'!A0", "$x_[$ \x1b[2J\x00 \ud800",
)  # fmt: skip
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Reader(HTMLParser):
    """What a browser would build from a page: tags with their attributes, texts, and the nesting checked."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.tags, self.text, self.open, self.rows = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The three files of a study as it normally is."""
    folder = tmp_path_factory.mktemp("report")
    write_report(make_study(), folder)
    return {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir()}


def written(study, folder):
    """The page, with empty pictures: to draw them takes most of the time."""
    with mock.patch.object(figures, "_address", return_value="data:image/png;base64,AA=="):
        write_report(study, folder)
    return (folder / "report.html").read_text(encoding="utf-8")


def assert_self_contained(page):
    reader = Reader(page)
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "object", "embed", "svg", "form"}
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in reader.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("xlink:href", "action", "style")]
        if "src" in attributes:
            assert re.fullmatch(r"data:image/png;base64,[\w+/]+=*", attributes["src"]), tag
        if "href" in attributes:
            assert attributes["href"].startswith("#"), (tag, attributes)
            assert attributes["href"][1:] in ids
        assert not re.search(
            r"url\((?!['\"]?#)|@import|expression|javascript", " ".join(filter(None, attributes.values()))
        )
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    return reader


@pytest.mark.rest
def test_a_page_needs_nothing_from_outside_and_says_so(report):
    reader = assert_self_contained(report["report.html"])
    policy = next(a["content"] for tag, a in reader.tags if tag == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    colours = set(re.findall(r"var\((--\w+)\)", report["report.html"]))
    style = report["report.html"][: report["report.html"].index("</style>")]
    assert all(style.count(f"{name}:") >= 2 for name in colours)  # each has a value for light and for dark


def test_every_picture_has_a_text_and_the_colours_of_the_page(report):
    """A dark page inverts them: white becomes transparent there."""
    pictures = [attributes for tag, attributes in Reader(report["report.html"]).tags if tag == "img"]
    drawn = [each for each in pictures if each["alt"]]
    assert len(drawn) == 2 * 4 + 4 + 1 + 4  # differences, along the runs, the search, gain and forgetting
    assert all({*each} == {"src", "alt"} for each in pictures)  # no width: the style sheet has it
    assert len(pictures) - len(drawn) == 3 * 4  # of a legend, beside each name
    colours = set()
    for each in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(each["src"].partition(",")[2]))).convert("RGB")
        ordered = [f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in sorted(image.getcolors(), reverse=True)]
        assert ordered[0] == LIGHT.paper
        colours.update(ordered)
    assert colours >= {*LIGHT.lines[:4], LIGHT.grid}


@pytest.mark.rest
def test_texts_of_runs_are_no_code(tmp_path):
    """Names of candidates, keys, columns, reasons, faults, the machine and the command."""
    study = make_study(names=HOSTILE, num_trials=2)
    keys = {hostile: 0.1 for hostile in HOSTILE}
    trials = [replace(run, reason=HOSTILE[0], parameters=keys | run.parameters) for run in study.candidates[1].trials]
    changed = replace(study.candidates[1], trials=trials, at_edge=dict.fromkeys(HOSTILE, "high"))
    study = replace(
        study,
        name=HOSTILE[1],
        candidates=[changed if each.name == changed.name else each for each in study.candidates],
        differences=[*study.differences, *(difference(each, "base", each, 1.0, 2.0) for each in HOSTILE)],
        cautions=[*HOSTILE],
        command=HOSTILE[0],
        versions=dict(zip(HOSTILE, HOSTILE, strict=True)),
        machine=HOSTILE[1],
        file={**study.file, "recipe": HOSTILE[0], HOSTILE[1]: HOSTILE[1]},
    )
    page = written(study, tmp_path)
    reader = assert_self_contained(page)
    assert HOSTILE[0] in "".join(reader.text)
    assert HOSTILE[1] in "".join(reader.text)
    assert not re.search("[\x00\x1b\ud800]", page)
    assert_self_contained(written(replace(study, candidates=[], problems=[*HOSTILE]), tmp_path))


def test_the_verdict_comes_first_and_is_one_sentence_a_comparison(report):
    study = make_study()
    text = " ".join("".join(Reader(report["report.html"]).text).partition("Verdict")[2].split())
    assert headline(study)[0] in text
    words = (
        ", each optimizer at the best of 6 settings (htmuon has the smallest optimizer.lr), soren is better than adamw;"
        " muon and htmuon are"
    )
    assert headline(study)[0].startswith(f"On held-out loss{words}")
    few = headline(replace(study, num_questions={"held-out": 40}))
    assert few[0].startswith(f"On held-out loss of only 40 examples{words}")
    assert few[1:] == headline(study)[1:]
    assert len(comparisons(study, "adamw")) == 3
    assert len(comparisons(study, "base")) == 4
    muon = comparisons(study, "adamw")[0]
    d = next(d for d in study.differences if (d.candidate, d.reference, d.measure) == ("muon", "adamw", "held-out"))
    assert f"detectable: {d.detectable:.3f}" in muon.facts
    worst = {c.name: max(run.metric for run in c.verdict) for c in study.candidates}
    assert f"worst run {worst['muon']:.3f}, adamw's {worst['adamw']:.3f}" in muon.facts


def test_so_few_runs_cannot_exclude_a_rare_failure_and_the_verdict_says_how_rare():
    """(1 - q)^n = 5%: 3 runs, 63%; 5 runs, 45%."""
    for seeds, share in (((1, 2, 3), "63%"), ((1, 2, 3, 4, 5), "45%")):
        last = headline(make_study(seeds=seeds))[-1]
        assert f"With {len(seeds)} runs of each" in last
        assert f"in up to {share} of an optimizer's runs" in last
    assert "in up to" not in " ".join(headline(make_study(differences=[])))


def pairs(study, equal=(), unclear=()):
    """The study with differences of all pairs; those of `equal` and `unclear` with these answers."""
    names, found = [c.name for c in study.candidates], []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            d = difference(b, a, "held-out", 0.05, 0.01, equivalence=0.02)
            if b in equal and a in equal:
                d = replace(d, answer="equivalent", is_equivalent=True)
            elif {a, b} & {*unclear}:
                d = replace(d, answer="not distinguishable", is_equivalent=False)
            found.append(d)
    return replace(study, differences=[*study.differences[:0], *found])


def test_which_one_to_take_is_answered_with_the_cheapest_of_the_equal():
    study = make_study()  # soren has the lowest loss, then muon, htmuon, adamw
    muon = next(c for c in study.candidates if c.name == "muon")
    faster = [replace(c, verdict=[replace(r, seconds=5.0) for r in c.verdict]) if c is muon else c
              for c in study.candidates]  # fmt: skip
    study = replace(study, candidates=faster)
    (said,) = [s for s in headline(pairs(study, equal=("muon", "soren"))) if s.startswith("Which")]
    assert said == (
        "Which one to take: soren has the best held-out loss; muon is as good within 0.020. Of these, muon took the"
        " least time: 5.0 s a run."
    )
    (said,) = [s for s in headline(pairs(study, unclear=("adamw",))) if s.startswith("Which")]
    assert said.endswith("best held-out loss; adamw may be as good, which these runs cannot show.")
    assert not [s for s in headline(study) if s.startswith("Which")]  # soren was compared with adamw alone


def test_a_loss_has_three_decimals_and_a_small_one_four():
    assert [size(value, "loss") for value in (1.38842, -0.01, 0.00962)] == ["1.388", "-0.010", "0.0096"]
    assert [signed_size(value, "percent") for value in (-0.0, -2.75)] == ["+0.0", "-2.8"]


def test_differences_have_their_candidates_colours_and_no_percent_beyond_100(monkeypatch):
    wide = difference("muon", "adamw", "zoo_mc", 90.0, 60.0)  # detectable: 90
    wider = difference("soren", "adamw", "zoo_mc", -20.0, 120.0)
    drawn = []
    monkeypatch.setattr(figures, "_panel", lambda *arguments, **options: drawn.append(arguments[3]))
    figures.differences_figure(make_study(differences=[wide, wider]), "adamw")
    axes = Drawing().subplots()
    drawn[0](axes)
    points = [line for line in axes.lines if line.get_marker() not in ("None", "")]
    assert [line.get_color() for line in points] == [LIGHT.lines[1], LIGHT.lines[3]]
    assert [line.get_markerfacecolor() for line in points] == [LIGHT.lines[1], LIGHT.paper]
    values = [x for line in axes.lines for x in line.get_xdata()]
    assert (min(values), max(values)) == (-100, 100)
    assert -105 < axes.get_xlim()[0] < axes.get_xlim()[1] < 105


def test_of_all_pairs_each_candidate_is_a_reference_of_those_after_it():
    pair = difference("soren", "muon", "held-out", 0.02, 0.01)
    study = make_study()
    study = replace(study, differences=[*study.differences, pair])
    lines = [line for line in headline(study)[1:] if line.startswith("On ")]
    assert [line.rpartition("), ")[2].partition("loss, ")[2].split()[0] for line in lines] == ["soren", "adamw,"]
    assert headline(study)[1] == "On held-out loss, soren is better than muon."
    assert comparisons(study, "muon")[0].lead == "soren is better than muon on held-out loss"
    words = "- soren is better than muon on held-out loss: its held-out loss is 0.020 lower"
    assert words in " ".join(screen(study).split())


def test_a_worse_candidate_is_called_worse_and_a_loss_of_retention_shown():
    worse = difference("muon", "base", "zoo_mc", -5.0, 1.0, margin=2.0, retained=False)
    item = comparisons(make_study(differences=[worse]), "base")[0]
    assert item.lead == "muon is worse than the starting checkpoint on zoo_mc"
    assert "its zoo_mc is 5.0 points lower (95% interval 4.0 to 6.0, corrected p < 0.001)" in item.facts
    assert "It is not shown to lose less than the margin of 2.0 points on zoo_mc." in item.facts


def test_scores_carry_the_answers_against_the_reference(report):
    study = make_study()
    rows = {row[0].strip(): row for row in reversed(Reader(report["report.html"]).rows)}  # of the first table
    assert [rows[name][1].strip()[-1] == "▲" for name in ("adamw", "muon", "soren")] == [False, False, True]
    assert "▲ better than adamw" in report["report.html"]
    assert '<td class="number better">' in report["report.html"]
    assert "▲" in screen(study)


def changing_differences(study, measures, **changes):
    """The study with changes of the differences to adamw in these measures."""
    differences = [replace(d, **changes) if d.reference == "adamw" and d.measure in measures else d
                   for d in study.differences]  # fmt: skip
    return replace(study, differences=differences)


def changing_runs(study, change):
    """The study whose candidates have the final runs that change(index of the candidate, run) returns."""
    candidates = [replace(each, verdict=[change(i, run) for run in each.verdict])
                  for i, each in enumerate(study.candidates)]  # fmt: skip
    return replace(study, candidates=candidates)


def test_an_open_difference_says_what_the_study_can_detect():
    study = make_study(names=("adamw", "muon"))
    for changes, words in (({"detectable": 90.0}, "detectable: 90.000"),
                           ({"detectable": None}, "the seeds gave identical results")):  # fmt: skip
        changed = changing_differences(study, {"held-out"}, answer="not distinguishable", **changes)
        assert words in comparisons(changed, "adamw")[0].facts


def test_an_equivalent_candidate_has_its_own_answer_and_sign():
    study, measures = make_study(names=("adamw", "muon")), {"held-out", *COLUMNS}
    study = changing_differences(study, measures, answer="equivalent", equivalence=0.05, is_equivalent=True)
    (item,) = comparisons(study, "adamw")
    assert item.lead == "muon is equivalent to adamw on all 4 measures"
    assert "equivalent within 0.050" in item.facts
    assert item.answer == "equivalent"
    assert " =" in screen(study)


def test_a_study_with_faults_has_no_verdict(tmp_path):
    study = make_study(names=("adamw", "soren"), problems=["muon: another order of the data"])
    shown = screen(study)
    candidates = [replace(each, trials=[], verdict=[], selected=None) for each in study.candidates]
    for text in (written(replace(study, candidates=candidates), tmp_path), shown):
        assert "muon: another order of the data" in text
        assert "No verdict" in text
        assert "better" not in text.split("</style>")[-1]
        assert "can detect" not in text


def test_a_study_where_nothing_was_measured_is_a_report_without_figures(tmp_path):
    lost = Run("soren", "search", 0, 0, "search/soren/00", {"optimizer.lr": 100.0}, "diverged", reason="NaN")
    trials = [lost, replace(lost, number=1, status="failed", metric=float("nan"))]
    candidate = Candidate("soren", {}, {}, trials, None, {})
    for study in (
        Study("empty", {}, False, [], None), Study("lost", {}, True, [candidate], None),
        Study("two", {}, True, [candidate, replace(candidate, name="adamw", trials=[])], {"zoo": 1.0}),
    ):  # fmt: skip
        page = written(study, tmp_path)
        assert not [tag for tag, _ in assert_self_contained(page).tags if tag == "img"]
        assert "There is no verdict" in page
        absent = ("The search", "Along the runs", "Every difference")
        assert not any(f">{heading}</h2>" in page for heading in absent)
        screen(study)


@pytest.mark.rest
def test_four_times_fifty_trials_of_many_evaluations_stay_small(tmp_path):
    study = make_study(num_trials=50)
    points = [Point(i, i, i / 7, 2 - i / 3000, None, i / 3000, i / 3000, 2 + i / 3000) for i in range(3000)]
    write_report(changing_runs(study, lambda _, run: replace(run, curve=points)), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 5e5


def test_many_candidates_look_different_without_colour_too():
    looks = [line_style(i) for i in range(84)]
    assert len({str(each) for each in looks}) == 84
    assert len({(str(each["linestyle"]), each["marker"]) for each in looks[:12]}) == 12


@pytest.mark.rest
def test_the_same_study_gives_the_same_bytes(report, tmp_path):
    write_report(make_study(), tmp_path)
    assert {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()} == report


def test_the_table_of_runs_has_every_run_and_no_formulas():
    study = make_study(names=("adamw", "=1+1"))
    rows = list(csv.DictReader(io.StringIO(trials_csv(study))))
    assert len(rows) == sum(len(each.trials) + len(each.verdict) for each in study.candidates)
    assert {row["status"] for row in rows} >= {"finished", "diverged"}
    assert [row["candidate"] for row in rows if row["candidate"].endswith("=1+1")] == ["'=1+1"] * (len(rows) // 2)
    run = study.candidates[0].trials[0]
    assert float(rows[0]["metric"]) == run.metric
    assert float(rows[0]["optimizer.lr"]) == run.parameters["optimizer.lr"]
    assert sum(row["selected"] == "yes" for row in rows) == 2


def screen(study):
    out = io.StringIO()
    Console(file=out, width=80, markup=False).print(terminal_verdict(study), highlight=False)
    return out.getvalue()


@pytest.mark.parametrize("name", ["muon", "a-candidate-with-a-long-name-of-more-than-forty-letters"])
def test_the_terminal_shows_the_verdict_in_eighty_columns(name):
    shown = screen(make_study(names=("adamw", name, "soren")))
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= 80
    assert "soren is better than adamw" in " ".join(shown.split())
    assert "…" not in shown


def test_searched_words_stand_beside_each_other():
    study = make_study(names=("adamw", "soren"))
    maps = ["exact", "minimax", True, 3, "exact", "minimax"]
    candidates = []
    for each in study.candidates:
        trials = [replace(run, parameters={"optimizer.map": v}) for run, v in zip(each.trials, maps, strict=True)]
        candidates.append(replace(each, trials=trials))
    assert search_figure(replace(study, candidates=candidates)).panels
    axes = Drawing().subplots()
    assert [set_scale(axes, maps)(value) for value in ("3", "True", "exact", "minimax")] == [0, 1, 2, 3]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "True", "exact", "minimax"]


def test_the_mean_curve_has_the_steps_of_all_seeds():
    candidate = make_study().candidates[0]
    runs = [replace(candidate.verdict[0], curve=candidate.verdict[0].curve[:4]), *candidate.verdict[1:]]
    points = mean_curve(runs, "step", "metric")
    assert [x for x, _ in points] == [0, 10, 20, 30]
    assert points[2][1] == pytest.approx(sum(run.curve[2].metric for run in runs) / 3)


def test_the_axis_shows_the_ends_of_curves_and_not_their_first_loss():
    low, high = focus([9.0, 2.0, 1.4, 1.2, 1.1, 1.0], higher_is_better=False)
    assert low < 1.0
    assert 2.0 < high < 3.0
    low, high = focus([-9.0, 0.5, 0.9, 1.0], higher_is_better=True)
    assert -9.0 < low < 0.5
    assert high > 1.0
    assert focus([1.0], higher_is_better=False) is None
    assert focus([1.0, 1.0], higher_is_better=False) is not None


def test_before_the_verdict_the_selected_trial_is_shown():
    candidate = replace(make_study().candidates[0], verdict=[])
    assert [run.stage for run in shown_runs(candidate)] == ["search"]
