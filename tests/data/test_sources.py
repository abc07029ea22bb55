"""Tests of rampup.data.sources, and of data of one's own: rows by number, streams of
rows and of batches, what is refused.
"""

import dataclasses
import threading
import time
import warnings

import grain
import jax
import numpy as np
import pytest
from helpers.toy import all_tokens, mesh_of, open_rows, plan_for, rows, start

import rampup
from rampup.data.batches import BatchOptions
from rampup.data.sources import TokenRows, as_source, check_repeatable
from rampup.errors import DataError


@pytest.mark.parametrize("number", [2, 3, 4, 5, 6, 8, 9, 10])
def test_token_rows_have_every_token_as_target_once(number):
    """Rows cover an array without loss: every token but the last is an input once,
    every token but the first a target.
    """
    source = TokenRows(
        [np.arange(number)], ["array"], sequence_length=4, vocab_size=100
    )
    assert all_tokens(source) == (list(range(number - 1)), list(range(1, number)))


def test_token_rows_do_not_cross_arrays():
    """Each file has rows of its own, which name it."""
    source = TokenRows(
        [np.arange(6), np.arange(50, 53)],
        ["one", "two"],
        sequence_length=4,
        vocab_size=100,
    )
    assert source.read(np.array([2]))["tokens"].tolist() == [[50, 51, 52, 0, 0]]
    names = [
        "one from token 0 (row 0)",
        "one from token 4 (row 1)",
        "two from token 0 (row 2)",
    ]
    assert [source.describe(row) for row in range(3)] == names


def test_synthetic_rows_follow_from_their_number():
    """Row n is the same every time, whatever it is read with, and other rows are held
    out. A source is taken as it is.
    """
    train, held_out = open_rows("synthetic")
    assert (
        train.read(np.array([3, 9]))["tokens"][1]
        == train.read(np.array([9]))["tokens"][0]
    ).all()
    assert not (
        train.read(np.array([0]))["tokens"] == held_out.read(np.array([0]))["tokens"]
    ).all()
    assert as_source(train) is train
    assert as_source([{"a": (1, 2)}, {"a": (3, 4)}]).read(np.array([1]))["a"][
        1
    ].tolist() == [4]


def test_stream_takes_no_more_rows_than_its_steps():
    """A stream reads the rows of the steps that it yielded and no others, so that its
    state can be saved with a step.
    """
    step, source = start(steps=4)[0], iter(rows())
    next(step.stream(source))
    assert next(source)["id"] == 16
    with pytest.raises(
        DataError,
        match="step 0 needs 16 rows in this process, but the source ended after 5",
    ):
        next(step.stream(rows()[:5]))
    assert len(list(step.stream(rows()[:32], drop_remainder=True))) == 2


COLUMNS = {"image": np.ones((64, 2)), "label": np.ones(64)}


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        (grain.MapDataset.range(99).to_iter_dataset(), {}, "step.stream"),
        ((n for n in range(9)), {}, "step.stream"),
        (
            grain.MapDataset.range(99).filter(lambda n: n % 2),
            {},
            "row 0 of .* is None, .* filter the rows before",
        ),
        (grain.MapDataset.range(99).repeat(), {"seed": 1}, "seed=None"),
        (
            tuple(COLUMNS.values()),
            {},
            r"arrays of shape \[64, 2\], \[64\] looks like columns.*list\(zip\(\*colu",
        ),
        (
            (COLUMNS["label"], COLUMNS["label"]),
            {},
            r"arrays of shape \[64\], \[64\] looks like columns.*list\(zip\(\*columns",
        ),
        (
            rows(),
            {"start": plan_for(mesh_of("one")).position(0)},
            "start is a PlanPosition and not the number of a step; give start=step",
        ),
        (
            COLUMNS,
            {},
            (r"a dict cannot be indexed by row; .*grain.MapDataset.range\(num_rows\)"),
        ),
        (rows(), {"stop": 13}, "steps 0 to 13 .* 0 to 12"),
    ],
)
def test_sources_that_cannot_be_indexed_are_refused(source, options, words):
    """Iterators, filtered and endless datasets and columns are errors that name the
    remedy; so are steps beyond the plan.
    """
    with pytest.raises(DataError, match=words):
        next(
            rampup.step_batches(
                source, plan_for(mesh_of("one")), mesh_of("one"), **options
            )
        )


def test_rows_by_number_are_a_source():
    """The remedies for columns work, and so does a dictionary of rows by number; a
    tuple of many short rows is one of rows.
    """
    step, _ = start(schedule="0:8", steps=1)
    rows_of = grain.MapDataset.range(64).map(
        lambda row: {name: x[row] for name, x in COLUMNS.items()}
    )
    for source in (rows_of, dict(enumerate(rows_of))):
        assert next(step.batches(source)).chunks[0]["image"].shape == (1, 8, 2)
    image, label = next(step.batches(list(zip(*COLUMNS.values(), strict=True)))).chunks[
        0
    ]
    assert (image.shape, label.shape) == ((1, 8, 2), (1, 8))
    assert next(step.batches(tuple(np.ones((16, 3))))).chunks[0].shape == (1, 8, 3)


def test_a_row_is_named_by_the_type_and_length_of_its_source():
    """Not by a part of its content, which says nothing and may be long."""
    assert as_source([{"x": 1}] * 2000).describe(3) == "row 3 of a list of length 2,000"
    assert as_source(range(6)).describe(0) == "row 0 of a range of length 6"


@pytest.mark.parametrize("way", ["microbatches", "step", "stream"])
def test_a_position_is_no_step_number(way):
    """Every way to batches says what `start` is."""
    step, _ = start(schedule="0:8", steps=1)
    mesh = mesh_of("one")
    plan = plan_for(mesh)
    given = {"start": plan.position(0)}
    with pytest.raises(DataError, match=r"start is a PlanPosition.*give start=step"):
        {
            "microbatches": lambda: next(
                rampup.microbatches(rows(), plan, mesh, **given)
            ),
            "step": lambda: step.batches(rows(), **given),
            "stream": lambda: step.stream(rows(), **given),
        }[way]()


def test_map_dataset_has_epochs_of_its_own():
    """Without a seed, a shuffled MapDataset has another order in its second epoch, as
    Grain's `repeat` gives.
    """
    mesh = mesh_of("one")
    source = grain.MapDataset.range(16).shuffle(seed=3)
    batches = rampup.step_batches(source, plan_for(mesh, "0:16", steps=2), mesh)
    found = np.concatenate(
        [
            np.concatenate(batch.chunks)[: batch.num_microbatches].ravel()
            for batch in batches
        ]
    )
    assert found.tolist() == [source.repeat()[n] for n in range(32)]
    assert found[:16].tolist() != found[16:].tolist()


@pytest.mark.parametrize(
    ("items", "batched", "words"),
    [
        (
            [
                {"x": np.zeros((9, 4)), "y": np.zeros(7)},
                {"x": np.zeros((7, 4)), "y": np.zeros(9)},
            ],
            True,
            "of as many rows, and was given 7 rows and 9 rows",
        ),
        (
            [{"x": np.zeros((9, 4)), "y": np.float32(1)}],
            True,
            "was given no rows and 9 rows",
        ),
        ([{}], True, "of as many rows, and was given nothing"),
        ([{}] * 99, False, "has no fields"),
        ([()] * 99, False, "has no fields"),
        (
            [{"x": {"text": "words"}, "y": 1.0}] * 99,
            False,
            r"batch\['x'\]\['text'\] cannot be put on a device",
        ),
        (
            [dataclasses.make_dataclass("Row", ["x"])(1.0)] * 99,
            False,
            "batch cannot be put .* has object; give rows",
        ),
    ],
)
def test_streamed_rows_that_do_not_fit_are_named(items, batched, words):
    """Arrays of different numbers of rows would be matched wrongly, and JAX does not
    say which part of a row is no number.
    """
    with pytest.raises(DataError, match=words):
        next(start()[0].stream(iter(items), batched=batched))


@pytest.mark.parametrize("batched", [False, True])
def test_a_dict_of_columns_is_no_stream(batched):
    """Which would yield its names."""
    columns = {"x": np.zeros((99, 4)), "y": np.zeros(99)}
    with pytest.raises(DataError, match="a dict yields its names; give an iterator"):
        next(start()[0].stream(columns, batched=batched))


ROWS = grain.MapDataset.source([{"x": np.ones((2, 3), np.float32)} for _ in range(32)])


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS.batch(4),
        ROWS.batch(4).map(lambda batch: batch).shuffle(seed=1).repeat(2)[3:],
        grain.MapDataset.concatenate([ROWS.map(lambda row: row), ROWS.batch(4)]),
    ],
    ids=["last", "before", "part"],
)
def test_batched_datasets_are_refused(dataset):
    """Where rows are expected, a dataset that batches is an error before a row is read,
    however it goes on.
    """
    step, _ = start(schedule="0:8", steps=2)
    with pytest.raises(
        DataError, match=r"is batched .* the plan decides .* or train with step.stream"
    ):
        next(step.batches(dataset))
    for source in (
        dataset.to_iter_dataset(),
        iter(dataset.to_iter_dataset()),
        ROWS.to_iter_dataset().batch(4),
    ):
        with pytest.raises(DataError, match=r"is batched .* or give batched=True"):
            next(step.stream(source))
    assert next(step.stream(ROWS.to_iter_dataset().batch(4), batched=True)).chunks[0][
        "x"
    ].shape == (1, 8, 2, 3)


def test_batched_loaders_are_refused_and_rows_of_two_dimensions_are_not():
    """A DataLoader's operations are looked at too; rows that are matrices, and unknown
    classes, are legal.
    """
    step, _ = start(schedule="0:8", steps=2)

    def loader(*operations):
        sampler = grain.samplers.IndexSampler(
            32, shard_options=grain.sharding.NoSharding(), num_epochs=1
        )
        return grain.DataLoader(
            data_source=ROWS, sampler=sampler, operations=operations
        )

    class Pairs(grain.MapDataset):
        """Rows that are two elements each, which rampup cannot know."""

        def __len__(self):
            return 16

        def __getitem__(self, index):
            return ROWS.batch(2)[index]

    for source in (
        loader(grain.transforms.Batch(4)),
        iter(loader(grain.transforms.Batch(4))),
    ):
        with pytest.raises(DataError, match="is batched"):
            next(step.stream(source))
    assert next(step.stream(loader())).chunks[0]["x"].shape == (1, 8, 2, 3)
    assert next(step.batches(ROWS.map(lambda row: row))).chunks[0]["x"].shape == (
        1,
        8,
        2,
        3,
    )
    assert next(step.batches(Pairs())).chunks[0]["x"].shape == (1, 8, 2, 2, 3)


class OneFile:
    """Rows of a file that is open once, read into one buffer: whoever reads meanwhile
    gets other rows.
    """

    def __init__(self, path):
        self.file, self.buffer, self.busy = (
            open(path, "rb", buffering=0),  # noqa: SIM115
            np.zeros(4, np.int32),
            0,
        )

    def __len__(self):
        return 64

    def __getitem__(self, row):
        self.busy += 1
        self.file.seek(16 * row)
        time.sleep(0)
        self.file.readinto(self.buffer)
        self.busy -= 1
        assert self.busy == 0, "two threads read"
        return {"x": self.buffer}


def test_a_source_is_read_by_one_thread_and_each_row_is_copied(tmp_path):
    """A source with one open file and one buffer gives every row as it is, also to two
    loaders at the same time.
    """
    np.repeat(np.arange(64, dtype=np.int32), 4).tofile(tmp_path / "rows")
    source, mesh = OneFile(tmp_path / "rows"), mesh_of("one")
    plan = plan_for(mesh, "0:16", steps=40)
    for one, other in zip(
        *(
            rampup.step_batches(source, plan, mesh, options=BatchOptions(num_threads=4))
            for _ in range(2)
        ),
        strict=True,
    ):
        start = one.position.consumed_samples
        for batch in (one, other):
            assert np.asarray(batch.chunks[0]["x"])[..., 0].ravel().tolist() == [
                n % 64 for n in range(start, start + 16)
            ]


@pytest.mark.parametrize(("declared", "num_threads"), [(False, 1), (True, 2)])
def test_a_source_declares_that_threads_may_read_it(declared, num_threads):
    """With `thread_safe = True`, two threads read; without it, one."""
    found = set()

    class Rows:
        thread_safe = declared

        def __len__(self):
            return 64

        def __getitem__(self, row):
            # The first step is read by the thread that takes it.
            if threading.current_thread() is threading.main_thread():
                return np.int32(row)
            found.add(threading.get_ident())
            # The threads of the next two steps meet here, if there are two.
            deadline = time.monotonic() + (10 if declared else 0.02)
            while len(found) < 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            return np.int32(row)

    assert (
        len(
            list(
                rampup.step_batches(
                    Rows(), plan_for(mesh_of("one"), steps=4), mesh_of("one")
                )
            )
        )
        == 4
    )
    assert len(found) == num_threads


class Augmented:
    """Rows of an image and its label that a function of (generator, row) changes; what
    is not a number equals nothing.
    """

    def __init__(self, change):
        self.change, self.generator = change, np.random.default_rng(0)

    def __len__(self):
        return 64

    def __getitem__(self, row):
        return {
            "x": self.change(self.generator, np.arange(9.0) + row),
            "label": np.float32(np.nan),
        }


@pytest.mark.parametrize("step_number", [0, 3])
def test_a_source_whose_rows_differ_when_read_again_is_refused(step_number):
    """A generator of the source's own gives other rows after every resume; one that is
    made of the row's number does not.
    """
    step, _ = start(schedule="0:16", steps=4)

    def flip(rng, x):
        return x[::-1] if rng.random() < 0.5 else x

    for change in (
        flip,
        lambda rng, x: np.roll(x, rng.integers(9)),
        lambda rng, x: x + rng.normal(),
    ):
        with pytest.raises(
            DataError,
            match=r"read again, in batch\['x'\]: .*default_rng\(\(seed, row\)\)",
        ):
            next(step.batches(Augmented(change), start=step_number))
        next(step.stream(Augmented(change)[row] for row in range(64)))
    seeded = Augmented(
        lambda rng, x: np.roll(x, np.random.default_rng((7, int(x[0]))).integers(9))
    )
    assert len(list(step.batches(seeded, start=step_number))) == 4 - step_number


def test_batches_that_are_given_as_rows_are_warned_of():
    """A list and a generator of batches name `batched=True`, with which nothing is
    said. The warning stands at the line of the caller.
    """
    step, _ = start(schedule="0:8", steps=2)
    loader = [{"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}] * 16
    for batches in (
        lambda: step.batches(loader),
        lambda: step.stream(iter(loader)),
    ):
        with pytest.warns(
            rampup.errors.DataWarning,
            match=r"\[4, 2\], \[4\]. If it is a batch of 4 rows.* batched=True",
        ) as caught:
            next(batches())
        assert [each.filename for each in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(step.stream(iter(loader), batched=True))


ORDINARY = {
    "number": (),
    "vector": (8,),
    "image and label": {"image": (32, 32, 3), "label": ()},
    "image and mask": {"image": (48, 64, 3), "mask": (48, 64)},
    "tokens and mask": {"tokens": (8,), "mask": (8,)},
    "tokens and pairs": {"tokens": (8,), "pairs": (8, 8)},
    "tokens and length": {"tokens": (9,), "length": ()},
    "features and target": {"x": (8,), "y": ()},
    "sequences of two lengths": {"source": (8, 4), "target": (6,)},
    "states of one step": {"state": (1, 4), "action": (1,)},
}


@pytest.mark.parametrize("shapes", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_rows_are_not_warned_of(shapes):
    """No usual row is taken for a batch, by number or one after the other."""
    step, _ = start(schedule="0:8", steps=2)
    row = jax.tree.map(
        lambda shape: np.ones(shape, np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(step.batches([row] * 16))
        next(step.stream(iter([row] * 16)))


EMPTY, RECORD = np.zeros((0, 3)), np.zeros(2, [("a", "i4"), ("b", "f4")])
# The array of row 5, that of the other rows, and the error.
UNUSUAL = {
    "empty": (
        EMPTY,
        EMPTY,
        r"batch\['x'\].* row 0 of .* has the shape \[0, 3\], and so no numbers",
    ),
    "structured": (RECORD, RECORD, r"batch\['x'\].* row 0 of .* has \[\('a', '<i4'\)"),
    "longer": (
        np.zeros(3),
        np.zeros(2),
        r"row 5 of .*\['x'\] is of shape \[3\], but of shape \[2\] in row 0",
    ),
    "deeper": (
        {"z": np.zeros(2)},
        np.zeros(2),
        r"row 5 of .*\['x'\] is absent, but of shape \[2\] in row 0",
    ),
    "integer": (
        np.int64([1, 2**32 + 5]),
        np.int64([0, 0]),
        r"\['x'\].* row 5 of .* has 4294967301, .* not fit int32; split",
    ),
    "unsigned": (
        np.uint64([1, 2**32]),
        np.uint64([0, 0]),
        r"row 5 of .* has 4294967296, which does not fit uint32",
    ),
    "number": (
        np.array([np.nan, -1e300]),
        np.zeros(2),
        r"row 5 of .* has -1e\+300, which does not fit float32; scale",
    ),
}


@pytest.mark.parametrize(("unusual", "usual", "words"), UNUSUAL.values(), ids=UNUSUAL)
def test_rows_that_would_not_arrive_as_they_are_name_field_and_row(
    unusual, usual, words
):
    """JAX would fail in its own words, or drop the upper half of an integer, without
    the name of the row.
    """
    step, _ = start(schedule="0:8", steps=2)
    items = [{"x": unusual if number == 5 else usual} for number in range(16)]
    for batches in (step.batches(items), step.stream(iter(items))):
        with pytest.raises(DataError, match=words):
            next(batches)
    if isinstance(unusual, np.ndarray) and unusual.shape == usual.shape:
        with pytest.raises(DataError, match=words):
            step.batch({"x": np.stack([item["x"] for item in items[:8]])})


def test_numbers_of_64_bits_that_fit_arrive_and_all_do_with_x64():
    """Small integers and infinity are as they were; with x64, which threads that read
    do not see, so is everything.
    """
    step, _ = start(schedule="0:8", steps=2)
    small = [
        {
            "n": np.int64(-(2**31)),
            "m": np.uint64(2**32 - 1),
            "x": np.float64(np.inf),
            "c": 1e3 + 1j,
        }
    ] * 16
    row = jax.tree.map(
        lambda x: x.ravel()[0].item(), next(step.batches(small)).chunks[0]
    )
    assert row == {"n": -(2**31), "m": 2**32 - 1, "x": np.inf, "c": 1e3 + 1j}
    with (
        jax.enable_x64(True)
        if hasattr(jax, "enable_x64")
        else jax.experimental.enable_x64()
    ):
        large = next(
            start(schedule="0:8", steps=2)[0].batches(
                [{"n": np.int64(2**40), "x": 1e300}] * 16
            )
        ).chunks[0]
        assert (large["n"].ravel()[0].item(), large["x"].ravel()[0].item()) == (
            2**40,
            1e300,
        )


class Padded:
    """A source of wide numbers, whose padding is what was in memory."""

    paths = ()

    def __len__(self):
        return 8

    def describe(self, row):
        """Name a row."""
        return f"row {row}"

    def read(self, rows):
        """Return numbers whose padding is another one each time."""
        bits = np.longdouble(rows).view(np.uint8).reshape(len(rows), -1)
        if np.finfo(np.longdouble).nmant == 63:  # 80 bits, as on x86
            bits[:, 10:] = np.random.default_rng().integers(0, 256, bits[:, 10:].shape)
        return {"x": bits.view(np.longdouble)[:, 0]}


def test_the_padding_of_a_number_is_not_part_of_a_row():
    """What is read again is compared in numbers."""
    rows = np.arange(4)
    found = Padded().read(rows)
    check_repeatable(Padded(), rows, found)
    with pytest.raises(DataError, match="row 1 is another one"):
        check_repeatable(Padded(), rows, {"x": found["x"] * 2})
