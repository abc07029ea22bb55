"""Tests of rampup.data.fields: lists in rows, the type of a field, and sources that
end.
"""

import json
import warnings

import jax
import numpy as np
import optax
import pytest
from helpers.toy import mesh_of, plan_for, start

import rampup
from rampup.data.fields import FieldTypes
from rampup.errors import DataEndedError, DataError


class Rows:
    """A source with a length, whose rows a function makes."""

    def __init__(self, make, number=64):
        self.make, self.number = make, number

    def __len__(self):
        return self.number

    def __getitem__(self, row):
        return self.make(row)


def arrays(batch):
    """Return the rows of a batch, microbatches joined."""
    chunks = jax.tree.map(lambda *parts: np.concatenate(parts), *batch.chunks)
    return jax.tree.map(
        lambda x: x[: batch.num_microbatches].reshape(-1, *x.shape[2:]), chunks
    )


LISTS = {
    "numbers": (lambda n: {"x": [n, n + 1, n + 2]}, (8, 3)),
    "nested": (lambda n: {"x": [[n, 1], [2, 3], [4, 5]]}, (8, 3, 2)),
    "numpy": (lambda n: {"x": [np.float32(n), np.float32(1)]}, (8, 2)),
    "arrays": (lambda n: {"x": [np.full(4, n), np.ones(4)]}, (8, 2, 4)),
    "flags": (lambda n: {"x": [n > 3, False]}, (8, 2)),
    "json": (lambda n: json.loads(json.dumps({"x": [n / 2, 1, 2]})), (8, 3)),
}


@pytest.mark.parametrize(("make", "shape"), LISTS.values(), ids=LISTS)
def test_a_list_in_a_row_is_one_array(make, shape):
    """Rows by number, stored rows, streams, batches of an evaluation, and batches of
    one's own have the same array, and not a leaf per number.
    """
    step, _ = start(schedule="0:8", steps=2)
    evaluate = rampup.EvalStep(lambda *args: None, mesh_of("one"))
    stored = [make(n) for n in range(16)]
    together = {"x": [row["x"] for row in stored[:8]]}
    found = [
        next(step.batches(Rows(make))),
        next(step.batches(stored)),
        next(step.stream(iter(stored))),
        next(evaluate.batches(stored, 8)),
    ]
    if not isinstance(stored[0]["x"][0], np.ndarray):
        found.append(next(step.stream(iter([together]), batched=True)))
        found.append(step.batch(together, 0))
    for batch in found:
        assert arrays(batch)["x"].shape == shape
        np.testing.assert_array_equal(
            arrays(batch)["x"], np.array(together["x"], np.float32)
        )


REFUSED = {
    "ragged": (
        lambda n: {"x": [[1, 2], [3]]},
        r"batch\['x'\] is a list whose parts have different lengths; pad or crop",
    ),
    "lengths": (
        lambda n: {"x": [1] * (n % 3 + 1)},
        r"row 1 of .*\['x'\] is of shape \[2\], but of shape \[1\] in row 0",
    ),
    "texts": (lambda n: {"x": ["a", "b"]}, r"batch\['x'\] .* row 0 of .* has a text"),
    "one text": (
        lambda n: {"x": "none" if n == 3 else 1.5},
        r"batch\['x'\] .* row 3 of .* has a text; give rows",
    ),
    "null": (
        lambda n: {"x": None if n == 3 else 1.5},
        r"row 3 of .*\['x'\] is absent",
    ),
    "null in a list": (
        lambda n: {"x": [1, None if n == 3 else 2]},
        r"batch\['x'\] .* row 3 of .* has object",
    ),
    "objects": (
        lambda n: {"x": [{"role": n}]},
        r"batch\['x'\] .* row 0 of .* has object",
    ),
    "longdouble": (
        lambda n: {"x": np.longdouble(n)},
        r"batch\['x'\].* row 0 of .* has float128, which no device has; cast",
    ),
}


@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_array_of_numbers_names_row_and_field(make, words):
    """Lists of different lengths, texts and nulls are refused where they stand."""
    step, _ = start(schedule="0:8", steps=2)
    with pytest.raises(DataError, match=words):
        next(step.batches(Rows(make)))
    words = words.replace("of .*", ".*")
    with pytest.raises(DataError, match=words):
        next(step.stream(make(n) for n in range(16)))


def test_a_row_that_is_a_list_of_arrays_is_a_structure():
    """Loaders give a pair as a list; columns in a list, as some collate rows, may be
    rows too, and are refused.
    """
    step, _ = start(schedule="0:8", steps=1)
    rows = [[np.ones((3, 2)), np.float32(n)] for n in range(8)]
    image, label = arrays(next(step.stream(iter(rows))))
    assert (image.shape, label.shape) == ((8, 3, 2), (8,))
    pair = [np.ones((8, 3)), np.arange(8)]
    image, label = arrays(next(step.stream(iter([pair]), batched=True)))
    assert (image.shape, label.shape) == ((8, 3), (8,))
    with pytest.raises(DataError, match=r"batch\['x'\] is a list of arrays"):
        next(step.stream(iter([{"x": [np.ones(8), np.ones(8)]}]), batched=True))


def by_step(values, size=8):
    """Return rows whose field is one value per step of `size` rows."""
    return [{"x": values[row // size]} for row in range(size * len(values))]


FITS = {
    "integers among floats": ([0.5, 3], "float32"),
    "whole floats among integers": ([2, 3.0], "int32"),
    "flags among integers": ([2, True], "int32"),
    "ones among flags": ([True, 1], "bool"),
    "wider": ([np.float16(1), 2.5], "float16"),
    "narrower": ([7, np.uint8(9)], "int32"),
}


@pytest.mark.parametrize(("values", "dtype"), FITS.values(), ids=FITS)
def test_a_field_has_the_type_of_the_first_batch(values, dtype):
    """What JSON and CSV write in another way is cast, so that one program runs."""
    step, _ = start(schedule="0:8", steps=2)
    rows = by_step(values)
    for batches in (step.batches(rows), step.stream(iter(rows))):
        found = [arrays(batch)["x"] for batch in batches]
        assert [x.dtype for x in found] == [dtype] * 2
        assert [float(x[0]) for x in found] == list(map(float, values))


MISFITS = {
    "fraction": ([2, 2.5], "is 2.5, but the field has int64"),
    "not a number": ([2, float("nan")], "is nan, but the field has int64"),
    "two": ([True, 2], "is 2, but the field has bool"),
    "negative": ([np.uint8(1), -1], "is -1, but the field has uint8"),
    "large": ([np.float16(1), 1e9], "is 1000000000.0, but the field has float16"),
    "complex": ([1.5, 1 + 2j], r"is \(1\+2j\), but the field has float64"),
}


@pytest.mark.parametrize(("values", "words"), MISFITS.values(), ids=MISFITS)
def test_a_number_that_does_not_fit_names_row_and_field(values, words):
    """The first batch is yielded, and the row of the second one is named."""
    step, _ = start(schedule="0:8", steps=2)
    rows = by_step([values[0], values[0]])
    rows[13] = {"x": values[1]}
    for batches, name in (
        (step.batches(rows), "row 13 of"),
        (step.stream(iter(rows)), "row 5 of step 1"),
    ):
        next(batches)
        with pytest.raises(DataError, match=rf"{name}.*batch\['x'\] {words}"):
            next(batches)


def test_the_steps_before_a_misfit_are_saved(tmp_path):
    """A loop ends with the error, and has a checkpoint of the steps before it."""
    mesh, tx = mesh_of("one"), optax.sgd(0.1)
    plan = plan_for(mesh, "0:8", steps=4)

    def loss_fn(params, batch, keys):
        return (params * batch["x"]).sum(), batch["x"].size, {}

    step = rampup.train_step(loss_fn, tx, plan, mesh)
    rows = by_step([1, 1, 1.5, 1])
    loop = rampup.Loop(
        plan=plan,
        step=step,
        batches=lambda start: step.batches(rows, start),
        folder=tmp_path,
        checkpoints=rampup.CheckpointOptions(checkpoint_period=9),
    )
    with pytest.raises(DataError, match=r"row 16 of .*batch\['x'\] is 1.5"):
        loop.run(rampup.create_state(np.float32(1), tx, mesh))
    assert (tmp_path / "checkpoints" / "2").is_dir()


def test_evaluation_has_one_type_for_what_is_left_over():
    """The last rows of an evaluation are whole numbers, and have the type of the
    others.
    """
    evaluate = rampup.EvalStep(lambda *args: None, mesh_of("one"))
    rows = [{"x": 0.5 if n < 8 else 2} for n in range(11)]
    found = [arrays(batch)["x"].dtype for batch in evaluate.batches(rows, 8)]
    assert found == [np.float32] * 2


def test_evaluation_needs_rows():
    """A mean over none of them would be no number."""
    evaluate = rampup.EvalStep(lambda *args: None, mesh_of("one"))
    with pytest.raises(DataError, match="the data to evaluate on has no rows"):
        next(evaluate.batches([], 8))


def test_repeated_reading_does_not_mind_a_type():
    """The first 16 rows are whole numbers and are read again without the others."""
    step, _ = start(schedule="0:32", steps=1)
    rows = Rows(lambda n: {"x": n if n < 16 else n + 0.5})
    assert arrays(next(step.batches(rows)))["x"].dtype == np.float32


def test_fields_that_come_or_go_are_refused():
    """A batch with other fields than the first, also of other names alone, is an error
    that names the row and both.
    """
    step, _ = start(schedule="0:8", steps=2)
    rows = [{"x" if n < 8 else "y": np.float32(n)} for n in range(16)]
    with pytest.raises(DataError, match=r"row 8 of a list .* is .*'y'.*'x'"):
        list(step.batches(rows))
    types, mesh = FieldTypes(), mesh_of("one")
    types.cast({"x": np.ones(2)}, "row {}".format, mesh)
    for other in ({"x": np.ones(2), "y": np.ones(2)}, {"y": np.ones(2)}):
        words = r"row 0 is .*'y'.*, but the first batch is .*\{'x': \*\}"
        with pytest.raises(DataError, match=words):
            types.cast(other, "row {}".format, mesh)


@pytest.mark.parametrize("number", [16, 18, 0])
def test_a_stream_that_ends_before_its_plan_is_an_error(number):
    """At a step or inside one, the error has the rows, the plan and the way out, which
    works; after the last step, nothing is asked of the source.
    """
    step, _ = start(schedule="0:8", steps=3)
    rows = [{"x": np.float32(n)} for n in range(number)]
    done = []
    with pytest.raises(
        DataEndedError,
        match=rf"the source ended after \d of them, {number} in all; the plan has 3"
        r" steps.*drop_remainder=True",
    ):
        done.extend(step.stream(iter(rows)))
    found = list(step.stream(iter(rows), drop_remainder=True))
    assert len(found) == number // 8
    assert len(list(step.stream(iter([*rows, *rows] * 2), stop=number // 8))) == len(
        found
    )


def in_batches(rows, size):
    """Return the batches of a loader, of which the last may be smaller."""
    return [
        jax.tree.map(lambda *x: np.stack(x), *rows[at : at + size])
        for at in range(0, len(rows), size)
    ]


@pytest.mark.parametrize("mesh_name", ["one", "data"])
@pytest.mark.parametrize("batched", [None, 5, 8, 39])
def test_the_remainder_of_a_ramp_is_left_out_by_one_argument(mesh_name, batched):
    """Whatever the batches of the loader: steps of 8, 8 and 16 of 39 rows, of which all
    but the last 7 are used once, in their order; without it, the error names it.
    """
    step, _ = start(mesh_name, schedule="0:8 16:16", steps=9)
    rows = [{"x": np.float32(n)} for n in range(39)]
    given = rows if batched is None else in_batches(rows, batched)
    options = {"batched": batched is not None}
    found = list(step.stream(iter(given), drop_remainder=True, **options))
    sizes = [batch.position.split.global_batch_size for batch in found]
    assert sizes == [8, 8, 16]
    used = np.concatenate([arrays(batch)["x"] for batch in found])
    assert sorted(used) == list(range(32))
    with pytest.raises(
        DataEndedError, match=r"39 in all; the plan has 9 steps.*drop_remainder=True"
    ):
        list(step.stream(iter(given), **options))


def test_rows_that_are_left_over_are_trained_on_in_a_last_phase():
    """A plan that ends with a phase of their number has a step of them alone."""
    step, state = start(schedule="0:8 16:2", steps=3)
    rows = rampup_rows(18)
    weights = []
    for batch in step.stream(iter(rows)):
        state, metrics = step(state, batch)
        weights.append(float(metrics["weight"]))
    expected = [
        sum(row["weight"] for row in rows[a:b]) for a, b in ((0, 8), (8, 16), (16, 18))
    ]
    assert weights == expected


def rampup_rows(number):
    """Return rows of the toy problem."""
    from helpers.toy import rows

    return rows(number)


def failing(number, error):
    """Yield rows until one raises."""
    for n in range(99):
        if n == number:
            raise error
        yield {"x": np.float32(n)}


@pytest.mark.parametrize("error", [KeyError("label"), OSError("gone"), ValueError("x")])
def test_a_row_that_raises_in_a_stream_has_a_number(error):
    """It is a DataError as of rows by number, caused by the error of the source."""
    step, _ = start(schedule="0:8", steps=3)
    batches = step.stream(failing(13, error))
    next(batches)
    with pytest.raises(
        DataError, match="row 13 of the stream, of step 1, cannot be read"
    ) as caught:
        next(batches)
    assert caught.value.__cause__ is error


def test_lists_are_no_warning_of_batches():
    """A row with lists of one length beside a number is not taken for a batch."""
    step, _ = start(schedule="0:8", steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(step.batches([{"ids": [1, 2, 3], "label": 0}] * 8))
