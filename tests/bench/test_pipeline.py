"""Tests of rampup.bench.pipeline and the modules that it is made of; the times themselves are not tested."""

import importlib.metadata
import sys
from fractions import Fraction

import jax
import pytest

from rampup.bench import pipeline
from rampup.bench.hlo import Loops, pipeline_loops
from rampup.bench.maxtext import MaxTextPipeline, arrange_layers
from rampup.bench.pipeline import QUICK, CostModelCheck, compare, run
from rampup.errors import ConfigError, MissingDependencyError
from rampup.plan import MeshAxes
from rampup.plan.pipeline import predicted_time
from rampup.run import make_mesh


def not_installed(name):
    """Say that a distribution is not installed."""
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.fixture(scope="module")
def result():
    """Return the quick benchmark without a peer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", not_installed)
        return run(quick=True)


def test_every_system_agrees_on_the_gradients(result):
    """Schedules with and without repeats, skipping or not, and GPipe give the gradients of the model without a pipeline."""
    compared = [row for row in result.rows if row["gradient_error"] is not None]
    assert [row["v"] for row in compared] == [1, 1, 2, 2, 1]
    assert all(row["gradient_error"] < 1e-5 for row in compared)
    assert all(row["step_ms"] > 0 and row["temp_bytes"] > 0 for row in result.rows)
    assert {tuple(row) for row in result.rows} == {pipeline.COLUMNS}


def test_loops_and_permutes_are_those_of_the_schedules(result):
    """Ours is one loop of v*m + p - 1 + v*p - 1 ticks and two permutes, GPipe two loops of m + p - 1 ticks and one permute."""
    for row in result.rows:
        p, m, v = row["p"], row["m"], row["v"]
        is_gpipe = "gpipe" in row["system"]
        groups = -(-m // p)
        forward_ticks = ((groups - 1) * v + v - 1) * p + (m - 1) % p + p
        assert row["iterations"] == (2 * (m + p - 1) if is_gpipe else forward_ticks + v * p - 1)
        assert row["permutes"] == 2


def test_memory_does_not_grow_with_the_microbatches(result):
    """Of one batch, more and smaller microbatches need less memory: what waits for its backward is 2*v*p - 1 of them."""
    of = {row["m"]: row["temp_bytes"] for row in result.rows if row["regret"] is not None and row["v"] == 1}
    assert list(of) == [1, 2, 4, 8, 16]
    assert sorted(of.values(), reverse=True) == list(of.values())


def test_the_notes_say_what_was_not_measured(result):
    """Fake devices, missing accelerators, the missing peer and the chooser's regret are in the notes."""
    text = "\n".join(result.notes)
    for words in ("total work", "not the critical path", "Not run: real accelerators", "regret (chosen / best)"):
        assert words in text
    assert "MaxText is not installed; to compare with it: pip install --no-deps maxtext" in text
    assert all(row["vs_maxtext"] is None for row in result.rows)


def test_the_chooser_is_ranked_against_every_cut(result):
    """Predicted ranks are a permutation, and the fastest has a regret of 1."""
    rows = [row for row in result.rows if row["regret"] is not None]
    assert len(rows) >= 5
    assert sorted(row["predicted_rank"] for row in rows) == list(range(1, len(rows) + 1))
    assert min(rows, key=lambda row: row["step_ms"])["regret"] == 1 == min(row["regret"] for row in rows)


class Peer:
    """Stands in for MaxText: the same arrangement of the layers, without a pipeline; with repeats it does not work."""

    version = "0"

    def forward(self, stage, *_, num_repeats, **__):
        """Return a function that applies all layers."""
        if num_repeats > 1:
            raise TypeError("no repeats today")
        return lambda layers, x: stage({name: w.reshape(-1, *w.shape[2:]) for name, w in layers.items()}, x)


def test_a_peer_stands_beside_ours_and_may_fail():
    """Each of ours gets its ratio to the peer with as many repeats, and what the peer cannot run is a note."""
    notes = []
    rows = compare(QUICK, 2, 4, Peer(), notes)
    *of_ours, of_peer = rows
    assert of_peer["system"] == "maxtext 0"
    assert of_peer["gradient_error"] < 1e-5
    assert [row["vs_maxtext"] is None for row in rows] == [False, False, True, True, False, True]
    assert of_ours[0]["vs_maxtext"] == pytest.approx(of_ours[0]["step_ms"] / of_peer["step_ms"])
    assert notes == ["MaxText's pipeline does not run at p=2, m=4, v=2: TypeError: no repeats today"]


def test_maxtext_itself():
    """Where MaxText is installed, its pipeline has the same gradients, with m*v + p - 1 ticks each way."""
    pytest.importorskip("maxtext")
    notes = []
    rows = compare(QUICK, 2, 4, MaxTextPipeline.load(), notes)
    assert not notes
    assert [(row["v"], row["iterations"]) for row in rows if row["system"].startswith("maxtext")] == [(1, 10), (2, 18)]
    assert all(row["gradient_error"] < 1e-5 for row in rows)


def test_what_maxtext_lacks_is_named(monkeypatch):
    """An installed MaxText with a missing import gives the import's name and the command that installs it."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9")
    monkeypatch.setitem(sys.modules, "maxtext.layers.pipeline", None)
    with pytest.raises(MissingDependencyError, match=r"MaxText 9\.9 is installed, .*maxtext.*it needs: pip install") as caught:
        MaxTextPipeline.load()
    assert caught.value.key.startswith("maxtext")


@pytest.mark.parametrize(("repeats", "shape"), [(1, (4, 2, 3)), (2, (2, 4, 1, 3))])
def test_layers_arranged_for_maxtext(repeats, shape):
    """Repeat r of stage s holds chunk r*p + s of the layers."""
    layers = {"w": jax.numpy.arange(24.0).reshape(8, 3)}
    mesh = make_mesh(MeshAxes(pipeline=4), jax.devices()[:4])
    found = arrange_layers(layers, mesh, repeats)["w"]
    assert found.shape == shape
    assert (found.reshape(8, 3) == layers["w"]).all()
    assert {shard.index[repeats - 1].start for shard in found.addressable_shards} == {0, 1, 2, 3}


@pytest.mark.parametrize("number", [1, 3])
def test_too_few_devices(number, monkeypatch):
    """With fewer than four devices it says how many there are and what to do."""
    devices = jax.devices()[:number]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ConfigError, match=rf"at least 4 devices .* num_devices={number} \(cpu\).*--fake-devices 8") as caught:
        run(quick=True)
    assert caught.value.nearest == (8,)


def check(seconds, default=8):
    """Return the chooser's check at p=4 and 16 samples."""
    return CostModelCheck(num_stages=4, samples=16, seconds=seconds, default_overhead=Fraction(default))


def times(h, repeats=(1, 2)):
    """Return the times that the cost model predicts."""
    return {
        (m, v): 0.25 * float(predicted_time(m, 16 // m, num_stages=4, num_repeats=v, overhead=Fraction(h)))
        for v in repeats
        for m in (1, 2, 4, 8, 16)
        if m >= 4 or v == 1
    }


@pytest.mark.parametrize("h", [0, 1, 3, 20])
def test_fitted_overhead_of_the_model_itself(h):
    """Times that follow the model give back its h, every rank and a regret of 1."""
    found = check(times(h))
    assert float(found.fitted_overhead) == pytest.approx(h, abs=1e-6)
    ranking = sorted(found.seconds, key=lambda cut: found.columns(cut)["predicted_rank"])
    assert [found.seconds[cut] for cut in ranking] == sorted(found.seconds.values())
    assert found.regret(ranking[0]) == 1


def test_regret_of_a_wrong_h():
    """An assumed overhead that is far too large picks too few microbatches, and the regret says what that costs."""
    seconds = times(0, repeats=(1,))
    found = check(seconds, default=1000)
    picked, best = (1, 1), (16, 1)
    assert found.columns(picked)["regret"] == seconds[picked] / seconds[best] == pytest.approx(64 / 19)
    assert [note.split(";")[0].split("picks ")[1] for note in found.notes()] == ["m=16, v=1", "m=1, v=1"]


@pytest.mark.parametrize("seconds", [{(1, 1): 1.0, (16, 1): 9.0}, {(1, 1): 400.0, (16, 1): 19.0}])
def test_times_that_give_no_overhead(seconds):
    """Times in which a tick costs less with larger microbatches, or more than in proportion, give no h, and a note says so."""
    found = check(seconds)
    assert found.fitted_overhead is None
    assert list(found.overheads) == ["default h"]
    assert "give no h" in found.notes()[-1]


HLO = """
%inner (x: f32[]) -> f32[] {
  %p = f32[]{0} collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  %q = f32[]{0} collective-permute-done(%p)
  %g = f32[]{0} custom-call(%p), custom_call_target="__cublas$gemm"
  %t = f32[]{0} custom-call(%p), custom_call_target="TopK"
}

%fused (x: f32[]) -> f32[] {
  ROOT %d = f32[2,2]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%branch (x: f32[]) -> (f32[2]{0}, f32[]) {
  %r = f32[]{0} collective-permute(%x), source_target_pairs={{0,1}}
}

%outer (x: (f32[], f32[2]{0})) -> f32[] {
  %a = f32[] while(%x), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

%ticks (x: f32[]) -> f32[] {
  %a = f32[] conditional(%x), branch_computations={%other, %branch}
  %b = f32[] collective-permute(%x), source_target_pairs={{0,1}}
  %d = f32[] fusion(%x), kind=kOutput, calls=%fused
}

%plain (x: f32[]) -> f32[] {
  %d = f32[] fusion(%x), kind=kOutput, calls=%fused
  %a = f32[] add(%x, %x)
}

ENTRY %main (x: f32[]) -> f32[] {
  %a = f32[] while(%x), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %b = f32[] while(%x), condition=%c, body=%plain, backend_config={"known_trip_count":{"n":"90"}}
  %c = f32[] while(%x), condition=%c, body=%ticks, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_loops_of_a_program():
    """Loops count that permute themselves or in what they call; a loop around one and loops without permutes do not."""
    assert pipeline_loops(HLO) == Loops(iterations=5 + 7, permutes=1 + 2, matmuls=1 + 1)
    assert pipeline_loops(HLO.replace('"known_trip_count":{"n":"7"}', "")) == Loops(iterations=None, permutes=3, matmuls=2)
    assert pipeline_loops("") == Loops(iterations=0, permutes=0, matmuls=0)
