"""Tests of rampup.contrib.lab.tune_command."""

import io

from rich.console import Console

from rampup.contrib.lab.tune_command import print_tuning

TRIAL = {"microbatch_size": 2, "num_microbatches": 16, "bytes": 2**30, "fits": True}
TIMED = {
    "step_seconds": 0.0123456,
    "spread": 0.04,
    "rounds": 5,
    "tokens_per_second": 123456.7,
}
UNTIMED = dict.fromkeys(TIMED)
PHASE = {
    "global_batch_size": 64,
    "per_device_batch_size": 8,
    "accumulation_steps": 4,
    "num_pipeline_microbatches": 2,
}
LEVER = {
    "name": "remat_policy=full",
    "bytes": 2**29,
    "saved_bytes": 2**29,
    "slowdown": 1.25,
    "fits": True,
    "compiled": True,
}
ODD = {"name": "tensor axis of 2", "fits": False, "compiled": False} | dict.fromkeys(
    ("bytes", "saved_bytes", "slowdown")
)
FOUND = {
    "device": "cpu",
    "num_devices": 4,
    "memory_gib": 16.0,
    "memory_is_named": True,
    "margin": 0.05,
}
FOUND |= {
    "usable_bytes": 15 * 2**30,
    "measured_peak_bytes": None,
    "pipeline_tick_overhead": 2.75,
    "notes": ["a note"],
}
FOUND |= {
    "largest_microbatch": 2,
    "next_larger": 4,
    "next_larger_run": "not run: this is computed",
}
FOUND |= {
    "candidates": [
        TRIAL | TIMED,
        TRIAL | UNTIMED | {"microbatch_size": 4, "bytes": None, "fits": False},
    ],
    "settings": {"microbatch_size": 2},
    "run_seconds": 12.5,
    "phases": [
        PHASE | {"microbatch_size": 2, "bytes": 2**30, "tokens_per_second": None}
    ],
    "alternatives": [{"settings": {}, "executables": 1, "run_seconds": None}],
    "levers": [LEVER | {"remark": ""}, ODD | {"remark": "vocab_size=5 is odd"}],
}


def printed(found):
    """Return what is printed at 80 columns, its spaces evened out."""
    console = Console(file=io.StringIO(), width=80, highlight=False)
    print_tuning(found, console)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.split())


def test_print_tuning_prints_everything():
    """The boundary, each candidate, the settings, each phase, the levers with their
    remarks, and the notes.
    """
    text = printed(FOUND)
    for part in (
        "4 x cpu, 16 GiB each (as given), of which 15 GiB are used: 5% are left free",
        (
            "the largest microbatch that fits is 2 samples; 4 does not (not run: this"
            " is computed)"
        ),
        "2 16 1 GiB 12.35 ms 4% 123,457 fits",
        "4 16 too much not timed does not fit",
        "recommended: microbatch_size=2; the run's steps take 12.5 s",
        "0 64 8 4 2 2 1 GiB not timed",
        "alternative: the configuration as it is: not timed",
        "pipeline_tick_overhead=2.75",
        "remat_policy=full 512 MiB 512 MiB x 1.25 yes",
        "note: tensor axis of 2: vocab_size=5 is odd",
        "note: a note",
    ):
        assert part in text


def test_print_tuning_for_an_absent_slice():
    """Every compiled size has its estimates, and every alternative its ratio and its
    programs.
    """
    estimate = {"roofline_seconds": 0.002, "roofline_tokens_per_second": 4000.0}
    slices = {
        "topology": "v5e:4x4",
        "compiled_for": "not run on",
        "compiler": "libtpu",
        "roofline_run_seconds": 2.0,
    }
    others = [
        {
            "settings": {"rampup_microbatch": "auto"},
            "executables": 2,
            "roofline_run_seconds": 3.0,
        }
    ]
    rows = [
        TRIAL | UNTIMED | estimate,
        TRIAL
        | UNTIMED
        | dict.fromkeys(estimate)
        | {
            "microbatch_size": 4,
            "fits": False,
        },
    ]
    phases = [FOUND["phases"][0] | estimate]
    found = (
        FOUND
        | slices
        | {
            "candidates": rows,
            "alternatives": others,
            "run_seconds": None,
            "phases": phases,
        }
    )
    text = printed(found)
    parts = (
        "2 16 1 GiB 2 ms 4,000 fits",
        "4 16 1 GiB not timed does not fit",
        "1 GiB 4,000",
    )
    assert all(
        part in text
        for part in (
            *parts,
            "alternative: rampup_microbatch=auto: 3 s, x 1.50; 2 compiled programs",
        )
    )
    assert "recommended so far" in printed(found | {"interrupted": True})


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
    own = printed(FOUND | {"memory_is_named": False, "measured_peak_bytes": 2**29})
    assert "(as reported by the device)" in own
    assert "512 MiB in use at most" in own
