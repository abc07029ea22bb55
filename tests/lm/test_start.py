"""Tests of rampup.lm.start: the folder of a run."""

import pytest

from rampup.errors import ConfigError
from rampup.lm.start import run_folder


def test_run_folder_of_a_name_is_found_again(tmp_path):
    """A named run's folder is found again; runs without a name never share one; a file
    in the way is an error with its key.
    """
    assert (
        run_folder(str(tmp_path), "mine")
        == run_folder(str(tmp_path), "mine")
        == tmp_path / "mine"
    )
    assert len({run_folder(str(tmp_path / "deep" / "er"), "") for _ in range(3)}) == 3
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ConfigError, match=r"cannot make the folder .*file: File exists"
    ) as caught:
        run_folder(str(tmp_path), "file")
    assert caught.value.key == "run_name"
    with pytest.raises(ConfigError, match="cannot make the folder") as caught:
        run_folder(str(tmp_path / "file"), "x")
    assert caught.value.key == "base_output_directory"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot make the folder"):
        run_folder(str(tmp_path / "link"), "")
