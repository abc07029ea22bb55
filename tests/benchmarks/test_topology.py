"""Tests of the hours of whole runs on paper; what compiles is tested in tests/tune."""

import pytest
import topology


@pytest.mark.slow
def test_a_ramp_saves_hours_only_where_a_larger_batch_is_faster():
    """Steps in proportion to the batch leave nothing to a ramp; a constant part of them makes larger batches and a ramp pay."""
    same = topology.hours_row("1B", 64, {rows: 0.1 * rows for rows in topology.CHIP_ROWS})
    # 20 billion tokens at 655,360 tokens a second are 8.48 hours, and some percent more for the noise.
    assert (same["small"], same["fastest"]) == ("65,536: 8.71", "65,536: 8.71")
    # 1.17 * 20% more at the end, as the batch is the next doubling of 896,000 tokens, and 1 / (1 - 0.47) times that on average.
    assert same["large"] == "1,048,576: 12.2"
    assert (same["ramp"], same["saved"]) == ("65,536 to 65,536: 8.71", "0.0% to 0.0%")
    found = topology.hours_row("1B", 64, {rows: 0.1 * (rows + 1) for rows in topology.CHIP_ROWS})
    hours = {name: float(found[name].split()[-1]) for name in ("small", "large", "fastest", "ramp")}
    assert found["ramp"].startswith("65,536 to 5")
    assert hours["ramp"] < hours["fastest"] < min(hours["large"], hours["small"])
