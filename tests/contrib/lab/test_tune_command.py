"""Tests of rampup.contrib.lab.tune_command."""

import io

from rich.console import Console

from rampup.contrib.lab.tune_command import print_tuning

TRIAL = {
    "microbatch_size": 2,
    "bytes": 2**30,
    "fits": True,
}
PHASE = {
    "global_batch_size": 64,
    "per_device_batch_size": 8,
    "accumulation_steps": 4,
    "num_pipeline_microbatches": 2,
}
FOUND = {
    "device": "cpu",
    "num_devices": 4,
    "memory_gib": 16.0,
    "margin": 0.05,
}
FOUND |= {"usable_bytes": 15 * 2**30}
FOUND |= {"largest_microbatch": 2, "next_larger": 4}
FOUND |= {
    "candidates": [
        TRIAL,
        TRIAL | {"microbatch_size": 4, "bytes": None, "fits": False},
    ],
    "settings": {"microbatch_size": 2},
    "phases": [
        PHASE | {"microbatch_size": 2, "bytes": 2**30, "tokens_per_second": None}
    ],
}


def printed(found):
    """Return what is printed at 80 columns, its spaces evened out."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_tuning(found, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_print_tuning_prints_everything():
    """The boundary, each candidate, the settings, and each phase."""
    text = printed(FOUND)
    for part in (
        "4 x cpu, 16 GiB each, of which 15 GiB are used: 5% are left free",
        "the largest microbatch that fits is 2 samples; 4 does not",
        "2 1 GiB fits",
        "4 too much does not fit",
        "recommended: microbatch_size=2",
        "0 64 8 4 2 2 1 GiB not timed",
    ):
        assert part in text
    assert "timed at" not in text
    timed = {**FOUND["phases"][0], "tokens_per_second": 3000.0}
    text = printed(FOUND | {"phases": [timed]})
    assert "1 GiB 3,000 tokens/s: timed at the fewest and the most microbatches" in text


def test_print_tuning_for_an_absent_slice():
    """The slices and their compiler are named, and no time is claimed."""
    slices = {
        "topology": "v5e:4x4",
        "compiled_for": "not run",
        "compiler": "libtpu 1",
        "candidates": [TRIAL],
    }
    text = printed(FOUND | slices)
    assert "v5e:4x4, not run; libtpu 1" in text
    assert "2 1 GiB fits" in text
    assert "recommended: microbatch_size=2" in text


def test_print_tuning_without_a_size_that_fits():
    """Without settings there is no recommendation; without a next size, none is claimed
    to fail.
    """
    nothing = printed(
        FOUND | {"settings": None, "largest_microbatch": None, "phases": []}
    )
    assert "no microbatch fits" in nothing
    assert "recommended" not in nothing
    assert "the largest microbatch tried, 2 samples, fits" in printed(
        FOUND | {"next_larger": None}
    )
