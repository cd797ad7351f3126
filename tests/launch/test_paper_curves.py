"""`soren-align curves --preset paper-losses`: a row for each model, both losses, a line for each run."""

import pytest
from PIL import Image
from soren_align import recipe
from soren_align.cli.app import main
from soren_align.core.figures import LIGHT
from soren_align.launch.show import without_common_folder
from soren_align.run import curves as run_curves
from soren_align.run.curves import Curve, Curves, limits
from tests.launch.test_show import write_metrics
from tests.support.run_folders import finished_run


def curves(scale):
    """A loss that falls from 10 to 1, at the end times `scale`, and an evaluation at every tenth step."""
    points = [(float(step), scale * max(1.0, 10 - step)) for step in range(1, 101)]
    return Curves({"loss": Curve(points), "eval_loss": Curve(points[9::10])})


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """drawn(runs, by) -> the Figure that draw_losses, or another function, draws."""
    figures = []
    monkeypatch.setattr(run_curves, "write_pictures", lambda path, draw: figures.append(draw(LIGHT)))

    def draw(runs, by=run_curves.draw_losses):
        by(runs, tmp_path / "a.png")
        return figures[-1]

    return draw


def test_models_are_rows_losses_are_columns_and_optimizers_are_lines(drawn):
    names = [f"llama-c4/{size}-{optimizer}" for size in ("60m", "350m") for optimizer in ("adamw", "muon", "soren")]
    runs = [(name, recipe.load(name), curves(scale)) for scale, name in enumerate(names, 1)]
    figure = drawn(runs)
    assert [axes.get_title("left") for axes in figure.axes] == ["training loss", "evaluation loss"] * 2
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["llama-60m", "llama-350m"]
    for number, axes in enumerate(figure.axes):
        assert [line.get_label() for line in axes.lines] == ["AdamW", "Muon", "Soren"]
        first = 3 * (number // 2) + 1
        assert [line.get_ydata()[-1] for line in axes.lines] == [first, first + 1, first + 2]
        assert [len(line.get_xdata()) for line in axes.lines] == [10 if number % 2 else 100] * 3


def test_runs_of_one_optimizer_have_the_names_of_their_folders(drawn):
    runs = [(f"runs/{name}", recipe.load("llama-c4/60m-muon"), curves(1)) for name in "ab"]
    figure = drawn([*runs, ("runs/c", recipe.load("llama-c4/60m-soren"), curves(1))])
    assert [line.get_label() for line in figure.axes[0].lines] == ["Muon, runs/a", "Muon, runs/b", "Soren"]


def test_an_optimizer_has_one_style_in_the_rows_of_all_models(drawn):
    names = ["60m-adamw", "60m-soren", "350m-muon", "350m-soren"]
    runs = [(name, recipe.load(f"llama-c4/{name}"), curves(1)) for name in names]
    figure = drawn(runs)
    styles = {(line.get_label(), line.get_color(), line.get_linestyle()) for axes in figure.axes for line in axes.lines}
    assert len(styles) == 3


def overlap(figure):
    """Whether the figure's legend covers a panel, or leaves the picture."""
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    width, height = figure.get_size_inches() * figure.dpi
    is_inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
    return not is_inside or any(box.overlaps(axes.get_window_extent()) for axes in figure.axes)


@pytest.mark.parametrize("length", [6, 40, 200])
def test_names_of_many_runs_cover_no_line(drawn, length):
    runs = [(f"{number:0{length}}", recipe.load("llama-c4/60m-soren"), curves(1)) for number in range(10)]
    assert not overlap(drawn(runs))
    assert not overlap(drawn([(name, each) for name, _, each in runs], run_curves.draw_curves))


def test_a_run_alone_has_its_legends_in_its_panels(drawn):
    run = curves(1)
    run.best = (97.0, 1.0)
    figure = drawn([("a", run)], run_curves.draw_curves)
    assert not figure.legends
    assert all(axes.get_legend() for axes in figure.axes)


@pytest.mark.parametrize(("paths", "expected"), [
    (["a/b/c", "a/b/d/e"], ("a/b", ["c", "d/e"])),
    (["a/b", "a/b/c"], ("", ["a/b", "a/b/c"])),
    (["a/b"], ("", ["a/b"])),
    (["a", "b"], ("", ["a", "b"])),
    (["/a/b", "c"], ("", ["/a/b", "c"])),
    (["/a/b", "/c"], ("/", ["a/b", "c"])),
])  # fmt: skip
def test_names_of_runs_leave_out_the_folder_of_all(paths, expected):
    assert without_common_folder(paths) == expected


def test_losses_of_the_first_tenth_of_the_steps_do_not_set_the_limits():
    points = curves(1)["loss"]
    low, high = limits([points, [(step, loss + 1) for step, loss in points]])
    assert (low, high) == pytest.approx((1 - 0.04, 2 + 0.04))
    assert limits([[(1, 5.0)]]) is limits([[]]) is limits([]) is None


@pytest.fixture
def runs(tmp_path):
    """Two runs, of which the second has logged no loss."""
    folders = [finished_run(tmp_path / name) for name in "ab"]
    write_metrics(folders[0].metrics, *({"step": step, "loss": 4 / step} for step in range(1, 20)))
    folders[1].metrics.unlink(missing_ok=True)
    return folders


def test_a_preset_draws_runs_that_have_losses_light_and_dark(runs, tmp_path, capsys):
    output = tmp_path / "losses.png"
    assert main(["curves", *map(str, runs), "--preset", "paper-losses", "--output", str(output)]) == 0
    dark = tmp_path / "losses-dark.png"
    out, err = capsys.readouterr()
    assert f"{output} and {dark}" in " ".join(out.split())
    assert f"{runs[1]}: training logged no loss, so it is not drawn" in " ".join(err.split())
    for path in (output, dark):
        with Image.open(path) as image:
            assert image.width == 1280


@pytest.mark.parametrize("options", [[], ["--preset", "paper-losses"]])
def test_runs_without_losses_are_refused_in_a_sentence(runs, tmp_path, capsys, options):
    output = tmp_path / "losses.png"
    assert main(["curves", str(runs[1]), *options, "--output", str(output)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert message.endswith("training logged no loss; train again with a smaller trainer.logging_steps")
    assert not output.exists()
