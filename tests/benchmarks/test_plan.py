"""Tests of benchmarks/plan.py."""

from maxtext_baselines import ReplayManager
from plan import CONFIG

from rampup.plan.per_device import RampupBatchManager


def test_manager_agrees_with_the_replay():
    """Through the benchmark's ramp, look-up and replay give the same batch at every thousandth step."""
    replay = ReplayManager(CONFIG, 0)
    manager = RampupBatchManager(CONFIG)
    for step in range(30_000):
        if step % 1_000 == 0:
            assert manager.ramp.global_batch_size_at(step) == replay.global_batch_size_current
            assert manager.ramp.samples_before(step) == replay.total_used_samples
        replay.update()
