"""Tests of rampup.cli.common: what a command does to its process before JAX is
imported.
"""

import contextlib
import os
import subprocess
import sys

import pytest

from rampup import cli
from rampup.cli import common

CODE = """
import os, sys
from rampup.cli import common
common.on_offer = lambda: True
common.has_accelerators = lambda: False
print(os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES"), flush=True)
common.enable_huge_pages()
print("continues")
"""


def starts(**environ):
    """Return what a process with these variables prints that asks for large pages where
    they are on offer.
    """
    others = {
        name: value for name, value in os.environ.items() if name != common.VARIABLE
    }
    command = [sys.executable, "-c", CODE, "a b", "--c"]
    return subprocess.run(
        command, env=others | environ, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_enable_huge_pages_re_executes_once():
    """The process keeps its arguments and its number, and the tunable is added to those
    that are set.
    """
    first, second, last = starts(GLIBC_TUNABLES="glibc.malloc.check=0")
    number, rest = first.split(" ", 1)
    assert rest == "['a b', '--c'] glibc.malloc.check=0"
    assert (
        second == f"{number} ['a b', '--c'] glibc.malloc.check=0:glibc.malloc.hugetlb=1"
    )
    assert last == "continues"
    assert starts()[1].endswith("] glibc.malloc.hugetlb=1")
    assert (
        len(starts(RAMPUP_HUGE_PAGES="0"))
        == len(starts(GLIBC_TUNABLES="glibc.malloc.hugetlb=0"))
        == 2
    )


def test_on_offer_needs_glibc_and_madvise(monkeypatch, tmp_path):
    """A C library that can ask, and a kernel that gives on request; another system has
    neither.
    """
    monkeypatch.setattr(common, "KERNEL", tmp_path / "enabled")
    monkeypatch.setattr(common.platform, "libc_ver", lambda: ("glibc", "2.36"))
    assert not common.on_offer()
    for kernel, offered in (
        ("[always] madvise never", False),
        ("always [madvise] never", True),
    ):
        (tmp_path / "enabled").write_text(kernel)
        assert common.on_offer() is offered
    for libc in (("glibc", "2.34"), ("", "")):
        monkeypatch.setattr(common.platform, "libc_ver", lambda found=libc: found)
        assert not common.on_offer()


@pytest.mark.parametrize(
    ("has_plugin", "files", "accelerators"),
    [
        (False, [], False),
        (True, [], True),
        (False, ["accel0"], True),
        (False, ["vfio/0", "vfio/vfio"], True),
        (False, ["vfio/vfio", "accel/accel0"], False),
    ],
)
def test_has_accelerators_needs_a_plugin_or_a_chip(
    monkeypatch, tmp_path, has_plugin, files, accelerators
):
    """Installed libtpu without a TPU is no accelerator, and none counts if JAX is
    restricted to the CPU.
    """
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(common, "DEVICE_FILES", tmp_path)
    monkeypatch.setattr(common, "accelerator_plugins", lambda: has_plugin)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert common.has_accelerators() is accelerators
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert not common.has_accelerators()


@pytest.mark.parametrize(
    ("argv", "words", "asked"),
    [
        (["train", "--help"], None, 1),
        (["plan", "--help"], None, 0),
        ([], None, 0),
        ([], ["train", "--help"], 0),
    ],
)
def test_main_re_executes_only_its_own_process(monkeypatch, argv, words, asked):
    """A command that computes, typed in a shell; never a program or a notebook that
    calls `main` with arguments.
    """
    calls = []
    monkeypatch.setattr(common, "enable_huge_pages", lambda: calls.append(1))
    monkeypatch.setattr(sys, "argv", ["rampup", *argv])
    with contextlib.suppress(SystemExit):
        cli.main(words)
    assert len(calls) == asked


def test_switch_is_not_a_configuration_key(monkeypatch, capsys):
    """Variables with the prefix RAMPUP_ set keys; this one does not."""
    monkeypatch.setenv("RAMPUP_HUGE_PAGES", "0")
    monkeypatch.setenv("RAMPUP_STEPS", "7")
    assert cli.main(["plan", "base", "--devices", "2", "--json"]) == 0
    assert '"total_steps": 7' in capsys.readouterr().out


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
