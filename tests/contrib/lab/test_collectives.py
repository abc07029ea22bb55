"""Tests of the collectives of programs written by hand: groups of devices, trips, bytes."""

import pytest

from rampup.contrib.lab.collectives import collective_rows, collectives_of
from rampup.contrib.lab.hlo import Array, Program

MESH = (("data", 2), ("fsdp", 2), ("tensor", 2))
LINE = "  ROOT %a = f32[64,64]{{1,0}} {kind}(%x), {groups}, to_apply=%add\n"
ENTRY = (
    "ENTRY %main (x: f32[64,64]) -> f32[64,64] {{\n  %x = f32[64,64]{{1,0}}"
    " parameter(0)\n" + LINE + "}}\n"
)


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("fsdp",), 2),
        ("replica_groups=[4,2]<=[8]", ("tensor",), 2),
        ("replica_groups=[2,4]<=[2,2,2]T(2,0,1)", ("data", "fsdp"), 4),
        (
            "replica_groups=mesh['data'=2,'fsdp'=2,'tensor'=2] {'data','tensor'}",
            ("data", "tensor"),
            4,
        ),
        (
            "replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}",
            ("fsdp", "tensor"),
            4,
        ),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", ("data", "fsdp", "tensor"), 8),
    ],
)
def test_groups_of_devices_are_named_by_their_axes(groups, axes, size):
    """Lists, reshaped ranges and axes, also those that the compiler made up, give the
    axes of the mesh.
    """
    (found,) = collectives_of(
        Program(ENTRY.format(kind="all-reduce", groups=groups)), MESH
    )
    assert (found.axes, found.group_size, found.num_bytes) == (axes, size, 64 * 64 * 4)


@pytest.mark.parametrize(
    "groups",
    [
        "mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}",
        "mesh['axis_0'=8] {'axis_0':(1)2}",
    ],
)
def test_other_groups_are_not_known(groups):
    """Another order of the devices and a part of an axis: no axes are claimed."""
    text = ENTRY.format(kind="all-reduce", groups=f"replica_groups={groups}")
    (found,) = collectives_of(Program(text), MESH)
    assert (found.axes, found.group_size) == (None, 0)


@pytest.mark.parametrize(
    ("stated", "runs", "open_loops"),
    [(', backend_config={"known_trip_count":{"n":"5"}}', 5, 0), ("", 1, 1)],
)
def test_trips_are_those_that_the_compiler_states(stated, runs, open_loops):
    """A loop without a stated trip count is open: its iterations are the caller's."""
    text = f"""
%cond (s: (s32[], f32[8])) -> pred[] {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]{{0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8]{{0}} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8]{{0}} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{{0}}) tuple(%next, %y)
}}

ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {{
  %x = f32[8]{{0}} parameter(0)
  %start = s32[] constant(2)
  %t = (s32[], f32[8]{{0}}) tuple(%start, %x)
  ROOT %w = (s32[], f32[8]{{0}}) while(%t), condition=%cond, body=%body{stated}
}}
"""
    (found,) = collectives_of(Program(text))
    assert (found.runs, found.open_loops, found.loops) == (runs, open_loops, ("w",))
    assert found.count((3,)) == runs * 3**open_loops


def test_an_asynchronous_collective_counts_once():
    """The start of one counts, with the bytes of its result."""
    text = """HloModule m, is_scheduled=true
ENTRY %main (x: f32[16], y: f32[8,8]) -> f32[32] {
  %x = f32[16]{0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %s = (f32[16]{0}, f32[32]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %d = f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = f32[32]{0} all-gather-done(%s)
}
"""
    (found,) = collectives_of(Program(text))
    assert (found.kind, found.num_bytes) == ("all-gather", 128)


def test_collectives_of_a_sparse_core_start_with_their_operands():
    """A TPU's SparseCore runs a reduce-scatter as a call of its own, which the operands
    of an update start.
    """
    text = """HloModule m, is_scheduled=true
%called (p: f32[16]) -> f32[8] {
  %p = f32[16]{0} parameter(0)
  ROOT %r = f32[8]{0} reduce-scatter(%p), replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add
}, execution_thread="sparsecore"

ENTRY %main (x: f32[16], y: f32[8,8]) -> f32[8] {
  %x = f32[16]{0} parameter(0)
  %y = f32[8,8]{1,0} parameter(1)
  %s = ((), (), s32[]) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %d = f32[8,8]{1,0} dot(%y, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %u = ((f32[16]{0}), f32[8]{0}) call-update(%s, %x)
  ROOT %e = f32[8]{0} call-done(%u)
}
"""
    (found,) = collectives_of(Program(text), (("data", 4),))
    assert (found.kind, found.num_bytes, found.axes) == (
        "reduce-scatter",
        64,
        ("data",),
    )


def test_exchanges_between_slices_are_collectives():
    """A TPU program sends arrays to other slices through its host."""
    text = """HloModule m, is_scheduled=true
ENTRY %main (x: f32[8,128]) -> f32[8,128] {
  %x = f32[8,128]{1,0} parameter(0)
  %t = token[] after-all()
  %r = (f32[8,128]{1,0}, u32[], token[]) recv(%t), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %s = (f32[8,128]{1,0}, u32[], token[]) send(%x, %t), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %u = token[] send-done(%s), is_host_transfer=true
  %v = (f32[8,128]{1,0}, token[]) recv-done(%r), is_host_transfer=true
  ROOT %e = f32[8,128]{1,0} get-tuple-element(%v), index=0
}
"""
    (found,) = collectives_of(Program(text))
    assert (found.kind, found.num_bytes, found.runs, found.between_slices) == (
        "all-reduce",
        4096,
        1,
        True,
    )
    assert collective_rows([found], (1,))[0]["between_slices"]


def test_arrays_have_the_bytes_of_their_type():
    """Also types of less than a byte, and those whose name has more than one number."""
    sizes = {
        "bf16": 2,
        "f32": 4,
        "f8e4m3fn": 1,
        "pred": 1,
        "c64": 8,
        "s4": 0.5,
        "token": 0,
    }
    assert {dtype: Array(dtype, (4,)).num_bytes / 4 for dtype in sizes} == sizes
