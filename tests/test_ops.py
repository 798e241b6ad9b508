"""Every op on every available instruction set of the CPU against its float64 reference."""

import numpy as np
import pytest

from cpu_device import cpu
from krnl.backends.cpu import available_isas
from krnl.backends.reference import ReferenceBackend
from krnl.dtypes import BF16, F32, DType
from krnl.ops import attention, gemm, loss, norm, optimizer, pointwise
from krnl.plan.op import Op
from op_bench import EXAMPLES, Bench, Chosen, Draw, check_drawn
from op_cases import CASES, Case


@pytest.mark.parametrize("activation", [F32, BF16], ids=str)
@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op.name)
def test_op_matches_its_reference(case: Case, isa: str, activation: DType) -> None:
    used = check_drawn(
        case, activation, EXAMPLES, lambda bench, draw: bench.check(cpu(isa)), shrinks=True
    )
    print(f"{case.op.name} {isa} {activation}: at most {used:.0%} of the allowance")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op.name)
def test_the_reference_backend_evaluates_the_definition(case: Case) -> None:
    def check(bench: Bench, draw: Draw) -> float:
        bench.target = F32
        _, reference = bench.reference()
        for p, got, want in zip(
            bench.op.outputs, bench.run(ReferenceBackend()), reference, strict=True
        ):
            for g, w in zip(got, want if p.group else [want], strict=True):
                np.testing.assert_array_equal(g, np.broadcast_to(w, g.shape))
        return 0.0

    check_drawn(case, F32, 5, check, shrinks=True)


def test_every_op_has_a_case() -> None:
    modules = (attention, gemm, loss, norm, optimizer, pointwise)
    defined = {v.name for m in modules for v in vars(m).values() if isinstance(v, Op)}
    assert defined == {case.op.name for case in CASES}


# Ragged, with a member and a row of each kind that nothing needs.
FEW = {
    "n": 6, "m": 9, "t": 7, "c": 12, "f": 5, "h": 4, "g": 2, "d": 6, "v": 11, "o": (4, 3, 5),
    "r": (2, 0, 1), "s": 3, "p": 3, "q": 0,
}  # fmt: skip
LIVE_ROWS = 4
# Of keys no more is known than how many pairs are visible. Backward the reference forms lse again,
# and where a query sees a single key, neither matters.
AT_MOST = {
    *(("attention", name) for name in ("k", "v")),
    *(("attention_backward", name) for name in ("lse", "q", "k")),
}


def words(bench: Bench) -> dict[str, int]:
    """What the data of a call tell, by loops."""
    given, rows = bench.values, range(bench.live)
    if "ids" in given or "index" in given:
        index = given["ids"] if "ids" in given else given["index"]
        return {"taken": len({int(index[i]) for i in rows} - {-1})}
    if "start" in given:
        stop = given["stop"] if "stop" in given else [i + 1 for i in rows]
        return {"visible": sum(int(stop[i]) - int(given["start"][i]) for i in rows)}
    return {}


def elements_read(bench: Bench, name: str) -> int:
    """Elements of an input in rows without which a result would be another."""
    seen, before = bench.reference()
    found, whole = 0, seen[name]
    for member in whole if isinstance(whole, list) else [whole]:
        for row in member:
            kept = row.copy()
            row += bench.rng.normal(size=row.shape)
            inputs = [seen[p.name] for p in bench.op.inputs if p.name != "live"]
            old = [seen["+" + p.name] for p in bench.op.outputs if p.updated]
            after = bench.op.evaluate(inputs, old, bench.attributes)
            row[...] = kept
            same = all(
                np.array_equal(x, y, equal_nan=True)
                for a, b in zip(before, after, strict=True)
                for x, y in (zip(a, b, strict=True) if isinstance(a, list) else [(a, b)])
            )
            found += 0 if same else row.size
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.op.name)
def test_an_op_says_what_it_reads(case: Case, seed: int) -> None:
    """Of every matrix: exactly the rows that matter where the data are known, and never fewer
    before that."""
    live = LIVE_ROWS if case.op.has_live else None
    bench = Chosen(case, F32, FEW, live=live, seed=seed)
    at_capacity = case.op.moved(bench.dims)
    dims = {**bench.dims, **({"n": live} if live else {}), **words(bench)}
    told = case.op.moved(dims)
    assert told.keys() <= {p.name for p in case.op.inputs + case.op.outputs}
    assert case.op.gathered in {"", *told}, "a gathered input is read in part"
    for p in case.op.inputs:
        value = bench.values.get(p.name)
        if value is None or len(p.letters) == 1:
            continue
        read = elements_read(bench, p.name)
        whole = sum(x.size for x in (value if p.group else [value]))
        rows = bench.rows(p, value)
        live_elements = sum(x.size for x in (rows if p.group else [rows]))
        if (case.op.name, p.name) in AT_MOST:
            assert read <= told.get(p.name, live_elements), p.name
        else:
            assert read == told.get(p.name, live_elements), p.name
        assert read <= told.get(p.name, live_elements) <= at_capacity.get(p.name, whole), p.name


def test_what_is_only_written_counts_once() -> None:
    """Nobody reads the zeroed, nor the rows of a cache that are not written."""
    assert pointwise.zero.moved({"p": 40}) == {"x": 40}
    sizes = {"n": 3, "m": 500, "g": 2, "d": 8}
    assert attention.cache_write.moved(sizes) == {"cache": 3 * 2 * 8}
