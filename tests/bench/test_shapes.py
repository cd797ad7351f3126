"""The shapes are those of the real models, and a wrong name is a sentence."""

import re

import pytest
from soren_align.bench.shapes import MODELS, check_device, parse
from soren_align.core.errors import UserError
from tests.support.command import imported

# Parameters in all, as the models' pages say, less embeddings, head, norms and biases.
TOTALS = {"llama-60m": 58_073_600 - 2 * 32_000 * 512 - 17 * 512,
          "qwen2.5-3b": 3_085_938_688 - 151_936 * 2048 - 73 * 2048 - 36 * (2048 + 2 * 256),
          "mistral-7b": 7_241_732_096 - 2 * 32_000 * 4096 - 65 * 4096}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_matrices_have_all_parameters_of_the_model(name):
    assert parse(name).num_parameters == TOTALS[name]
    assert sum(parse(name).per_layer.values()) == 7


def test_shapes_by_hand_are_counted():
    found = parse("16x16, 8X24,16x16")
    assert (found.per_layer, found.num_layers) == ({(16, 16): 2, (8, 24): 1}, 1)
    assert found.num_parameters == 2 * 256 + 192


@pytest.mark.parametrize(("text", "message"), [
    ("qwen2.5-7b", "did you mean 'qwen2.5-3b'?"), ("lama60m", "did you mean 'llama-60m'?"),
    ("0x5", "found '0x5', which has a side of 0; write shapes"), ("5", "or shapes such as 512x1376"),
    ("", "or shapes such as 512x1376"), ("-3x5", "found '-3x5'"), ("16x16,", "found ''"),
    ("16x16,llama-60m", "write the model alone"),
])  # fmt: skip
def test_what_is_no_shape_is_refused(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        parse(text)


def test_all_wrong_shapes_are_named_at_once():
    with pytest.raises(UserError) as error:
        parse("16x16,0x5,ax7")
    assert len(error.value.problems) == 2


@pytest.mark.parametrize(("name", "message"), [("cdua", "did you mean 'cuda'?"), ("tpu", "did you mean 'cpu'?")])
def test_an_unknown_device_is_refused(name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_device(name)


@pytest.mark.process
def test_reading_shapes_takes_no_torch():
    assert not imported("import soren_align.bench.shapes", ["torch"])
