"""Every benchmark runs at its smallest size."""

import json

import pytest

from rampup.bench import BENCHES, bench
from rampup.errors import ConfigError


@pytest.mark.bench
@pytest.mark.parametrize("name", BENCHES)
def test_bench_has_a_complete_table(name, quick, quick_rows):
    """All rows have the same columns, the result is JSON, and every measurement was reported when it was made."""
    result = quick(name)
    assert result.name == name
    assert result.rows
    assert result.notes
    assert {tuple(row) for row in result.rows} == {result.columns}
    assert json.loads(json.dumps(result.to_dict()))["rows"]
    done = [(number, total) for _, number, total in quick_rows(name)]
    assert done == [(number + 1, len(done)) for number in range(len(done))]


def test_bench_rejects_an_unknown_name():
    """The error lists the benchmarks."""
    with pytest.raises(ConfigError, match="unknown benchmark 'speed'; choose from ramp") as caught:
        bench("speed")
    assert caught.value.nearest == tuple(BENCHES)
