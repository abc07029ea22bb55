"""Tests of rampup.bench.hlo."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rampup.bench.hlo import Reductions, all_reduces
from rampup.run.mesh import make_mesh

HLO = """
%add (a: f32[], b: f32[]) -> f32[] {
  %c = f32[] add(%a, %b)
}

%inner (x: f32[]) -> f32[] {
  %a = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%x, %y), to_apply=%add
}

%branch (x: f32[]) -> f32[] {
  %a = f32[] all-reduce-start(%x), to_apply=%add
  %b = f32[] all-reduce-done(%a)
}

%outer (x: f32[]) -> f32[] {
  %a = f32[] while(%x), condition=%c, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
  %b = f32[] conditional(%x), branch_computations={%branch, %add}
}

ENTRY %main (x: f32[]) -> f32[] {
  %a = f32[] while(%x), condition=%c, body=%outer
  %b = pred[7]{0} all-reduce(%x), to_apply=%add
}
"""


def test_loops_multiply():
    """One in a loop of five in a loop of three is carried out fifteen times, and all that stand in loops are counted once."""
    inner, branch, outside = 2 * 3 * 4 + 4 * 2, 4, 7
    assert all_reduces(HLO, unknown_trips=3) == Reductions(15 + 3 + 1, 15 * inner + 3 * branch + outside, 2)
    assert all_reduces(HLO, unknown_trips=3).times(2) == Reductions(38, 2 * (15 * inner + 3 * branch + outside), 2)
    assert all_reduces("", unknown_trips=1) == Reductions(0, 0, 0)


def test_a_compiled_program():
    """A sum over a cut axis in a loop is found in what the compiler wrote, with its bytes and its trips."""
    mesh = make_mesh(devices=jax.devices()[:4])
    x = jax.device_put(np.ones((8, 4), np.float32), NamedSharding(mesh, PartitionSpec("data")))

    def total(x, number):
        return jax.lax.fori_loop(0, number, lambda i, so_far: so_far + jnp.sum(x * so_far, axis=0), jnp.zeros(4))

    compiled = jax.jit(total, out_shardings=NamedSharding(mesh, PartitionSpec())).lower(x, jnp.int32(1)).compile()
    assert all_reduces(compiled.as_text(), unknown_trips=6) == Reductions(6, 6 * 16, 1)
