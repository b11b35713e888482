"""Plans: every problem has one, a step lies in one group, parts cover K once, and a user may bring a table."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lowbit.functional.dispatch import Problem
from hf_lowbit.functional.grid import BITS
from hf_lowbit.kernels.triton import plans
from hf_lowbit.kernels.triton.plans import Plan, can_use_words, group_of, plan_for, read_table, table_name


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROBLEM = Problem(4, 128, False, False, False, 4096, 4096, 1, torch.bfloat16, "cuda")

problems = st.builds(
    Problem,
    bits=st.sampled_from(BITS),
    group_size=st.sampled_from([0, 32, 64, 96, 128, 160, 1024]),
    per_tensor=st.just(False),
    asymmetric=st.booleans(),
    int8_activations=st.booleans(),
    out_features=st.integers(0, 200000),
    in_features=st.integers(1, 65536),
    rows=st.integers(0, 10000),
    dtype=st.sampled_from(DTYPES),
    device=st.just("cuda"),
)


@given(problems, st.sampled_from([(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]), st.integers(1, 200), st.booleans())
def test_every_problem_has_a_plan(problem, capability, processors, aligned):
    plan = plan_for(problem, capability, processors, aligned)
    for size in (plan.block_m, plan.block_n, plan.block_k):
        assert size & (size - 1) == 0, plan
    if plan.kernel == "words":
        assert can_use_words(problem, aligned)
        steps = -(-problem.in_features // (16 if problem.bits in ("ternary", 2, 3) else 32 // problem.bits))
    else:
        steps = problem.in_features
        assert plan.block_k >= 32
        assert not group_of(problem) or group_of(problem) % plan.block_k == 0
    steps = -(-steps // plan.block_k)
    # all of K, and no part without a step
    assert (plan.parts - 1) * plan.part_steps < steps <= plan.parts * plan.part_steps
    assert 1 <= plan.parts <= plans.MOST_PARTS


def test_few_rows_are_cut_into_parts_and_many_are_not():
    assert plan_for(PROBLEM, (9, 0), 132, True).parts > 1
    assert plan_for(PROBLEM._replace(rows=4096), (9, 0), 132, True).parts == 1
    # a small device is busy sooner
    assert plan_for(PROBLEM, (9, 0), 16, True).parts == 1


def test_small_layers_get_narrow_tiles():
    small = PROBLEM._replace(out_features=1024, in_features=1024)
    assert plan_for(small, (9, 0), 132, True).block_n == 64
    assert plan_for(PROBLEM, (9, 0), 132, True).block_n == 128
    words = small._replace(bits="ternary", group_size=0, int8_activations=True)
    assert plan_for(words, (9, 0), 132, True).block_n == 4
    # a tile is no narrower than the warps of a program need
    assert plan_for(small._replace(rows=200), (9, 0), 132, True).block_n == 128


@pytest.mark.parametrize("bits", BITS)
def test_one_row_of_int8_goes_by_words_where_rows_are_words(bits):
    one = PROBLEM._replace(bits=bits, int8_activations=True)
    assert plan_for(one, (8, 0), 108, True).kernel == "words"
    assert plan_for(one, (8, 0), 108, False).kernel == "tiles"
    assert plan_for(one._replace(rows=2), (8, 0), 108, True).kernel == "tiles"
    assert plan_for(one._replace(int8_activations=False), (8, 0), 108, True).kernel == "tiles"
    assert plan_for(one._replace(in_features=1001), (8, 0), 108, True).kernel == "tiles"


@pytest.mark.parametrize(
    ("capability", "name"),
    [((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90"), ((10, 3), "sm_90"), ((12, 0), "sm_80")],
)
def test_devices_have_a_table(capability, name):
    assert table_name(capability) == name


@pytest.mark.parametrize("name", ["sm_80", "sm_90"])
def test_tables_say_where_their_shapes_come_from(name):
    table = json.loads((plans.TABLES / f"{name}.json").read_text())
    assert table["origin"] and table["devices"]
    # rows are read in order: the open end comes last
    for activations in ("int8", "float"):
        limits = [row["max_rows"] for row in table["rows"] if row["activations"] == activations]
        assert limits == sorted(limits, key=lambda limit: (limit is None, limit)) and limits[-1] is None


@pytest.fixture
def own_table(monkeypatch, tmp_path):
    """Write a table and use it."""

    def use(row):
        path = tmp_path / "table.json"
        path.write_text(json.dumps({"rows": [row]}))
        monkeypatch.setenv(plans.TABLE_VARIABLE, str(path))

    yield use
    monkeypatch.undo()
    read_table.cache_clear(), plan_for.cache_clear()


ROW = {
    **dict(zip(Plan._fields[:9], ("tiles", 16, 32, 64, 2, 3, 1, False, False), strict=True)),
    "activations": "float",
}


def test_a_table_of_ones_own(own_table):
    read_table.cache_clear(), plan_for.cache_clear()
    own_table({**ROW, "max_rows": None})
    plan = plan_for(PROBLEM, (9, 0), 1, True)
    assert (plan.block_n, plan.block_k, plan.warps, plan.parts) == (32, 64, 2, 1)
    assert str(plan) == "tensor cores on tiles of 16 x 32 x 64 (M, N, K), K whole"
    with pytest.raises(ValueError, match="no row for 1 rows of int8 x"):
        plan_for(PROBLEM._replace(int8_activations=True), (9, 0), 1, True)


def test_unknown_fields_are_refused(own_table):
    read_table.cache_clear(), plan_for.cache_clear()
    own_table({**ROW, "max_rows": None, "block_q": 4})
    with pytest.raises(ValueError, match="`block_q` in .* is no field of a plan"):
        plan_for(PROBLEM, (9, 0), 1, True)
