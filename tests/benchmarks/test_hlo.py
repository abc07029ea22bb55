"""Tests of benchmarks/hlo.py."""

from hlo import Loops, Reductions, all_reduces, pipeline_loops

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


def test_all_reduces_multiplies_by_the_iterations():
    """One in a loop of five in a loop of three is executed fifteen times; in_loops
    counts each once.
    """
    inner, branch, outside = 2 * 3 * 4 + 4 * 2, 4, 7
    assert all_reduces(HLO, unknown_trips=3) == Reductions(
        15 + 3 + 1, 15 * inner + 3 * branch + outside, 2
    )
    assert all_reduces(HLO, unknown_trips=3).times(2) == Reductions(
        38, 2 * (15 * inner + 3 * branch + outside), 2
    )


PIPELINE_HLO = """
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

ENTRY %main (x: f32[]) -> f32[] {
  %a = f32[] while(%x), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %b = f32[] while(%x), condition=%c, body=%fused, backend_config={"known_trip_count":{"n":"90"}}
  %c = f32[] while(%x), condition=%c, body=%ticks, backend_config={"known_trip_count":{"n":"7"}}
}
"""


def test_pipeline_loops_counts_loops_that_permute():
    """Loops count if they, or computations that they call, permute; a loop around one
    and other loops do not count.
    """
    assert pipeline_loops(PIPELINE_HLO) == Loops(
        iterations=5 + 7, permutes=1 + 2, matmuls=1 + 1
    )
    unknown = PIPELINE_HLO.replace('"known_trip_count":{"n":"7"}', "")
    assert pipeline_loops(unknown) == Loops(iterations=None, permutes=3, matmuls=2)
