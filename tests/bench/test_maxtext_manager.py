"""Tests of rampup.bench.maxtext."""

from types import SimpleNamespace

import pytest

from rampup.bench.maxtext import ReplayManager, maxtext_manager
from rampup.plan import BatchRamp

FILE = """
import unwanted
class Other: pass
class RampupBatchManager:
    def __init__(self, config, step_num):
        self.seen = config, step_num, math.ceil(0.5)
"""


def test_the_installed_file_is_used_without_its_dependencies(monkeypatch, tmp_path):
    """An installed MaxText gives the peer, though neither the package nor what the file imports can be imported."""
    folder = tmp_path / "maxtext" / "utils"
    folder.mkdir(parents=True)
    (folder / "rampup_batch.py").write_text(FILE)
    (tmp_path / "maxtext" / "__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)
    make, origin = maxtext_manager()
    assert make("config", 3).seen == ("config", 3, 1)
    assert "installed MaxText" in origin


def test_without_maxtext_the_replay_is_ours(monkeypatch):
    """Where the package is absent, the same replay is timed, and the result says so."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    make, origin = maxtext_manager()
    assert make is ReplayManager
    assert "not installed" in origin


@pytest.mark.parametrize(
    ("start", "increment", "end", "devices", "samples"),
    [(4, 2, 12, 4, 500), (1, 1, 3, 8, 100), (2, 3, 8, 1, 77), (1, 15, 16, 2, 9)],
)
def test_the_replay_is_that_of_reference_cases(start, increment, end, devices, samples):
    """Our writing takes the steps of the closed form that reproduces MaxText's reference sequences."""
    config = SimpleNamespace(
        per_device_batch_size_start=start,
        per_device_batch_size_increment=increment,
        per_device_batch_size=end,
        global_rampup_samples=samples,
        num_target_devices=devices,
    )
    ramp = BatchRamp.linear(start=start * devices, increment=increment * devices, end=end * devices, samples=samples)
    manager = ReplayManager(config, 0)
    for step in range(ramp.ramp_steps + 3):
        assert manager.global_batch_size_current == ramp.global_batch_size_at(step)
        assert manager.total_used_samples == ramp.samples_before(step)
        assert ReplayManager(config, step).global_batch_size_current == manager.global_batch_size_current
        assert manager.update() == (step + 1 < ramp.ramp_steps)
