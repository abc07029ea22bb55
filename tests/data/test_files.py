"""Tests of rampup.data.files."""

import os
import resource
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers.toy import all_tokens, open_rows

from rampup.data.files import fingerprints, open_token_file
from rampup.errors import DataError


def test_open_sources_reads_text(tmp_path):
    """Text is bytes in the files' order, a zero after each; every n-th file is held
    out; rows name their file.
    """
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"text number {number}")
    train, held_out = open_rows("text", str(tmp_path / "*.txt"))
    text, eval_text = (
        bytes(all_tokens(source)[0] + all_tokens(source)[1][-1:])
        for source in (train, held_out)
    )
    assert eval_text == b"text number 10\0text number 30\0"
    assert text.count(b"\0") == 38
    assert b"number 10\0" not in text
    assert train.describe(0) == f"{tmp_path}/00.txt from byte 0 (row 0)"
    assert "01.txt from byte 2" in train.describe(4)


def test_open_sources_defaults_to_the_standard_library():
    """The standard library's source is enough to train on, and evaluation reads other
    files.
    """
    train, held_out = open_rows("text")
    assert len(train) > 10 * len(held_out) / 2 > 1000
    assert not {
        train.describe(row).split(" from")[0] for row in range(0, len(train), 1000)
    } & {
        held_out.describe(row).split(" from")[0] for row in range(0, len(held_out), 100)
    }


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_open_sources_reads_token_arrays(tmp_path, suffix):
    """Memory-mapped .npy and .bin files give their tokens; the last rows are held
    out.
    """
    tokens = np.arange(1, 42, dtype=np.uint16)
    path = tmp_path / f"tokens.{suffix}"
    (
        np.save(path, tokens)
        if suffix == "npy"
        else path.write_bytes(tokens.astype("<u2").tobytes())
    )
    train, held_out = open_rows("tokens", str(path))
    assert (len(train), len(held_out)) == (9, 1)
    assert all_tokens(train)[0] + all_tokens(held_out)[0] == list(range(1, 41))
    _, other = open_rows("tokens", str(path), eval_files=str(path))
    assert len(other) == 10


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "fewer than two tokens"),
        ("a.npy", None, "matches no file"),
        ("a.npy", b"", "cannot be read"),
        ("a.npy", b"\x93NUMPY garbage", "cannot be read"),
        (
            "a.npy",
            np.zeros((2, 3), np.int32),
            "must be a one-dimensional array of integers",
        ),
        (
            "a.npy",
            np.zeros(30, np.float32),
            "must be a one-dimensional array of integers",
        ),
        ("a.npy", np.array([{}], object), "cannot be read"),
        ("a.npy", np.zeros(1, np.int32), "fewer than two tokens"),
        ("a.npy", np.zeros(5, np.int32), "too few to hold out"),
        ("a.bin", b"", r"a\.bin cannot be read: its size, 0,"),
        ("a.bin", bytes(4001), r"a\.bin cannot be read: its size, 4,001,"),
        (
            "a.npy",
            lambda path: (np.save(path, np.zeros(4000)), os.truncate(path, 4000)),
            "cannot be read",
        ),
        ("a.csv", b"1,2", "must end in .npy or .bin"),
        (
            "a.bin",
            lambda path: path.symlink_to("nowhere"),
            r"a\.bin, which is not a regular file",
        ),
        # From a pipe, reading would never end.
        ("a.bin", os.mkfifo, r"a\.bin, which is not a regular file"),
    ],
)
def test_open_sources_refuses_broken_token_files(tmp_path, name, content, message):
    """A file that is missing, empty, truncated or of another kind is a DataError that
    names it.
    """
    path = tmp_path / name
    if isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    elif callable(content):
        content(path)
    elif content is not None:
        path.write_bytes(content)
    kind = {".txt": "text"}.get(path.suffix, "tokens")
    with pytest.raises(DataError, match=message) as caught:
        open_rows(kind, str(path))
    assert name in str(caught.value)


@pytest.mark.parametrize("stored", ["<u2", "<i4"])
def test_tokens_of_twice_the_bytes_are_noticed(tmp_path, stored):
    """Read as `uint16`, the default, every second token of int32 is 0."""
    np.arange(1, 42, dtype=stored).tofile(tmp_path / "a.bin")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_rows("tokens", str(tmp_path / "a.bin"))
    said = [str(found.message) for found in caught]
    assert ["every second token is 0" in text for text in said] == [True] * (
        stored == "<i4"
    )


def test_read_names_tokens_outside_the_vocabulary(tmp_path):
    """A token beyond the vocabulary is refused with file, row and value."""
    np.save(tmp_path / "a.npy", np.array([1, 2, 3, 4, 5, 6, 300, 8, 9] * 5, np.int32))
    train, _ = open_rows("tokens", str(tmp_path / "a.npy"))
    with pytest.raises(
        DataError,
        match=(
            r"a.npy from token 4 \(row 1\): token 300 must be at least 0 and below"
            r" vocab_size=256"
        ),
    ):
        train.read(np.array([0, 1]))


def test_open_sources_holds_out_the_last_rows_of_few_text_files(tmp_path):
    """A single text file is enough to train on: if no complete file can be spared, its
    last rows are held out.
    """
    (tmp_path / "my.txt").write_text("0123456789" * 8)
    train, held_out = open_rows("text", str(tmp_path / "my.txt"))
    assert (len(train), len(held_out)) == (19, 1)
    assert "my.txt from byte 76 (row 19)" in held_out.describe(0)
    (tmp_path / "my.txt").write_text("012")
    with pytest.raises(DataError, match=r"my\.txt: 1 row, too few to hold out 1"):
        open_rows("text", str(tmp_path / "my.txt"))


@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "int32", "uint32", ">u2", "int64"]
)
@pytest.mark.parametrize("number", [1, 2, 1000])
def test_token_file_reads_the_parts_of_an_array(tmp_path, dtype, number):
    """Every part of a .npy file, of either byte order, is that of the array."""
    array = (np.arange(number) % 120).astype(dtype)
    np.save(tmp_path / "a.npy", array)
    file = open_token_file(str(tmp_path / "a.npy"), "uint16")
    assert len(file) == number
    for part in (
        slice(0, number),
        slice(0, 0),
        slice(number // 2, number + 50),
        slice(number, number + 5),
        slice(1, 3),
    ):
        np.testing.assert_array_equal(file[part], array[part])


def test_token_file_reads_on_where_the_system_returns_less(tmp_path, monkeypatch):
    """Linux returns at most 2 GiB at a time; a file that ends is still an error."""
    array, pread = np.arange(1000, dtype=np.int32), os.pread
    np.save(tmp_path / "a.npy", array)
    file = open_token_file(str(tmp_path / "a.npy"), "uint16")
    monkeypatch.setattr(
        os, "pread", lambda number, size, first: pread(number, min(size, 1024), first)
    )
    np.testing.assert_array_equal(file[3:1000], array[3:])
    os.truncate(tmp_path / "a.npy", 3000)
    with pytest.raises(DataError, match="ends at byte 3,000: it was truncated"):
        file[3:1000]


def test_fingerprints_name_files_below_the_shared_folder(tmp_path):
    """Files keep their names when all of them move, and files of the same name in two
    folders are two.
    """
    for number, name in enumerate("xy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(str(number))
    found = fingerprints([str(tmp_path / name / "a.txt") for name in "xy"])
    assert list(found) == ["x/a.txt", "y/a.txt"]
    assert len(set(found.values())) == 2
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert fingerprints([str(moved / name / "a.txt") for name in "xy"]) == found
    with pytest.raises(DataError, match=r"x/a\.txt cannot be read"):
        fingerprints([str(tmp_path / "x" / "a.txt")])


@pytest.fixture
def few_files():
    """Let this process open no more than 256 files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_more_token_files_than_may_be_open(tmp_path, few_files):
    """Rows of 300 files come in any order and from several threads, where 256 files may
    be open; a replaced file is named.
    """
    for number in range(300):
        np.full(9, number % 200, "<u2").tofile(tmp_path / f"{number:03}.bin")
    train, held_out = open_rows("tokens", str(tmp_path / "*.bin"), length=4)
    wanted = [np.random.default_rng(seed).permutation(len(train)) for seed in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for rows, batch in zip(wanted, threads.map(train.read, wanted), strict=True):
            np.testing.assert_array_equal(
                batch["tokens"], np.repeat((rows // 2 % 200)[:, None], 5, axis=1)
            )
    assert held_out.read(np.array([0]))["tokens"].shape == (1, 5)
    (tmp_path / "new").write_bytes((tmp_path / "000.bin").read_bytes())
    (tmp_path / "new").rename(tmp_path / "000.bin")
    train.read(np.arange(100, 300))
    with pytest.raises(
        DataError,
        match=r"row 0\): .*000\.bin is another file than when the run started",
    ):
        train.read(np.array([0]))


def test_a_fingerprint_is_that_of_the_content(tmp_path):
    """A file of the same size and times but another content has another one."""
    path = tmp_path / "a.bin"
    path.write_text("0")
    before, status = fingerprints([str(path)]), os.stat(path)
    path.write_text("x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprints([str(path)]) != before
