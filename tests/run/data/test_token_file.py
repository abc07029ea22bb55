"""Tests of rampup.run.data.token_file."""

import numpy as np
import pytest

from rampup.run.data.token_file import open_token_file


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", ">u2", "int64"])
@pytest.mark.parametrize("number", [1, 2, 1000])
def test_parts_are_those_of_the_array(tmp_path, dtype, number):
    """Every part of a .npy file, of either byte order, is that of the array."""
    array = (np.arange(number) % 120).astype(dtype)
    np.save(tmp_path / "a.npy", array)
    file = open_token_file(str(tmp_path / "a.npy"), "uint16")
    assert len(file) == number
    for part in (slice(0, number), slice(0, 0), slice(number // 2, number + 50), slice(number, number + 5), slice(1, 3)):
        np.testing.assert_array_equal(file[part], array[part])


def test_bin_files_are_little_endian(tmp_path):
    """A .bin file is read as the tokens it holds, whatever the machine."""
    (tmp_path / "a.bin").write_bytes(bytes([1, 0, 2, 1]))
    assert open_token_file(str(tmp_path / "a.bin"), "uint16")[0:2].tolist() == [1, 258]
