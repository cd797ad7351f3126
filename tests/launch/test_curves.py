"""`soren-align curves`: the losses and scores of several runs in one picture, and legends that cover no line."""

import pytest
from PIL import Image
from soren_align.cli.app import main
from soren_align.launch.show import without_common_folder
from tests.launch.test_show import write_metrics
from tests.support.run_folders import finished_run


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


@pytest.fixture
def runs(tmp_path):
    """Two runs, of which the second has logged no loss."""
    folders = [finished_run(tmp_path / name) for name in "ab"]
    write_metrics(folders[0].metrics, *({"step": step, "loss": 4 / step} for step in range(1, 20)))
    folders[1].metrics.unlink(missing_ok=True)
    return folders


def test_runs_that_have_losses_are_drawn_light_and_dark(runs, tmp_path, capsys):
    output = tmp_path / "losses.png"
    assert main(["curves", *map(str, runs), "--output", str(output)]) == 0
    dark = tmp_path / "losses-dark.png"
    out, err = capsys.readouterr()
    assert f"{output} and {dark}" in " ".join(out.split())
    assert f"{runs[1]}: training logged no loss, so it is not drawn" in " ".join(err.split())
    for path in (output, dark):
        with Image.open(path) as image:
            assert image.width == 1200


def test_runs_without_losses_are_refused_in_a_sentence(runs, tmp_path, capsys):
    output = tmp_path / "losses.png"
    assert main(["curves", str(runs[1]), "--output", str(output)]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert message.endswith("training logged no loss; train again with a smaller trainer.logging_steps")
    assert not output.exists()
