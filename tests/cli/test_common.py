"""Tests of rampup.cli.common: what a command does to its process before JAX is
imported.
"""

import os
import sys

from rampup import cli
from rampup.cli import common


def test_a_tpu_is_not_searched_for_where_there_is_none(tmp_path, monkeypatch):
    """With libtpu installed to compile, JAX is set to the CPU, unless the machine or
    the user has something else.
    """
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").touch()
    device = tmp_path / "pci" / "0000:00:01.0"
    device.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(common, "PCI_DEVICES", tmp_path / "pci")
    monkeypatch.setattr(common, "accelerator_plugins", lambda: False)
    monkeypatch.delitem(sys.modules, "jax")
    found = {}
    for vendor, given in (("0x8086", None), (common.GOOGLE, None), ("0x8086", "cuda")):
        (device / "vendor").write_text(f"{vendor}\n")
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        if given is not None:
            monkeypatch.setenv("JAX_PLATFORMS", given)
        common.skip_absent_tpu()
        found[vendor, given] = os.environ.get("JAX_PLATFORMS")
    assert list(found.values()) == ["cpu", None, "cuda"]


def test_a_slip_on_the_command_line_gets_a_hint(capsys):
    """A misspelled command, and a key that is written as an option."""
    for arguments, hint in {
        "trian base": "unknown command 'trian'; did you mean train?",
        "xyz": "unknown command 'xyz'; choose from train, generate",
        "plan base --steps 10": "set without dashes, steps=10;",
        "plan base --steps=10": "set without dashes, steps=10;",
        "plan base --steps": "set without dashes, steps=VALUE;",
    }.items():
        assert cli.main(arguments.split()) == 2
        assert hint in capsys.readouterr().err
