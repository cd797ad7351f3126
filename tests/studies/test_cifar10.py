"""CIFAR-10 in its binary format: invented files are read byte for byte, and what is no CIFAR-10 is refused."""

import shutil
import sys

import numpy as np
import pytest
from soren_align.core.errors import UserError

from studies import cifar10, cnn

NAMES = [*cifar10.TRAINING, *cifar10.TEST]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of files with 30 records each, three of each class, in a random order."""
    monkeypatch.setattr(cifar10, "NUM_RECORDS", 30)
    rng = np.random.default_rng(0)
    for name in NAMES:
        records = rng.integers(256, size=(30, 3073), dtype=np.uint8)
        records[:, 0] = rng.permutation(np.repeat(np.arange(10), 3))
        (tmp_path / name).write_bytes(records.tobytes())
    return tmp_path


def test_a_record_is_a_label_and_then_the_red_green_and_blue_rows(folder):
    train, test = cifar10.load(folder)
    assert [tuple(part.shape) for part in (*train, *test)] == [(150, 3, 32, 32), (150,), (30, 3, 32, 32), (30,)]
    content = (folder / "data_batch_2.bin").read_bytes()
    pixels, labels = train[0][30 + 7], train[1][30 + 7]
    assert labels == content[7 * 3073]
    for channel, row, column in ((0, 0, 0), (1, 5, 31), (2, 31, 30)):
        byte = content[7 * 3073 + 1 + channel * 1024 + row * 32 + column]
        assert float(pixels[channel, row, column]) == pytest.approx(byte / 127.5 - 1, abs=1e-6)


def test_a_file_of_the_published_size_is_read_to_its_last_record(tmp_path):
    """10,000 records: 30,730,000 bytes, by CIFAR-10's page."""
    file = tmp_path / "test_batch.bin"
    with file.open("wb") as stream:
        stream.truncate(30_730_000)
        stream.seek(30_730_000 - 3073)
        stream.write(bytes([9, *[200] * 3072]))
    records = cifar10.read(file)
    assert records.shape == (10_000, 3073)
    assert records[-1].tolist() == [9, *[200] * 3072]
    assert records[:-1].max() == 0


def changed(name, change):
    def apply(folder):
        (folder / name).write_bytes(change(bytearray((folder / name).read_bytes())))

    return apply


def with_label(label, position=4):
    def change(content):
        content[position * 3073] = label
        return content

    return change


FAULTS = {
    "no such folder": (shutil.rmtree, "there is no such folder; name a folder"),
    "missing file": (lambda folder: (folder / "data_batch_4.bin").unlink(), "has no file data_batch_4.bin; name a"),
    "truncated": (changed("test_batch.bin", lambda c: c[:-1]), "test_batch.bin: has 92,189 bytes, not 92,190; unpack"),
    "too long": (changed("data_batch_1.bin", lambda c: c + c), "data_batch_1.bin: has 184,380 bytes, not 92,190"),
    "empty": (changed("data_batch_5.bin", lambda c: b""), "data_batch_5.bin: has 0 bytes, not 92,190"),
    "label": (changed("data_batch_3.bin", with_label(10)), "data_batch_3.bin: image 4 has the label 10"),
    "last label": (changed("test_batch.bin", with_label(255, 29)), "test_batch.bin: image 29 has the label 255"),
    "other classes": (changed("test_batch.bin", lambda c: bytes(len(c))), "0 to 30 images per class, but CIFAR-10"),
    "Python version": (
        lambda folder: [(folder / name).rename(folder / name.removesuffix(".bin")) for name in NAMES],
        "has the Python version of CIFAR-10, whose pickles can run code; name a folder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_no_cifar_10_is_refused_before_anything_is_computed(folder, monkeypatch, capsys, fault):
    plant, message = FAULTS[fault]
    plant(folder)
    with pytest.raises(UserError) as caught:
        cifar10.load(folder)
    assert message in str(caught.value)
    monkeypatch.setattr(cnn, "tables", lambda *_: pytest.fail("the study trained"))
    monkeypatch.setattr(sys, "argv", ["cnn.py", "--cifar10", str(folder)])
    with pytest.raises(SystemExit) as ended:
        cnn.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(str(caught.value))


def test_the_study_trains_on_all_images_and_measures_whole_mini_batches(folder, monkeypatch):
    calls = []
    monkeypatch.setattr(cnn, "BATCH_SIZE", 8)
    monkeypatch.setattr(cnn, "tables", lambda seed, train, held_out: calls.append((seed, train, held_out)))
    monkeypatch.setattr(sys, "argv", ["cnn.py", "3", "--cifar10", str(folder)])
    cnn.main()
    ((seed, train, held_out),) = calls
    assert (seed, len(train[1]), len(held_out[1])) == (3, 150, 24)
    ((accuracy, by_layer),) = cnn.training(seed, train, held_out, epochs=[1])
    assert 0 <= accuracy <= 1
    assert by_layer["head"].shape == (3, 10, 84)
