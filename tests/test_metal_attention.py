"""What attention on Metal promises beyond right numbers: memory that is bounded, tiles that are
skipped, keys that are read once, scores of any size."""

from functools import cache
from typing import Any

import numpy as np
import pytest

from krnl.dtypes import F16, F32, I32, DType
from krnl.kernels.metal import attention
from krnl.kernels.metal.table import TABLE
from krnl.ops import attention as ops
from krnl.plan.buffer import Buffer, Kind
from krnl.plan.lower import lower
from krnl.plan.step import Step
from metal_call import check
from metalsim.install import SimulatedBackend, metal_backend
from op_bench import Chosen
from op_cases import CASE

FORWARD, BACKWARD = CASE["attention"], CASE["attention_backward"]
TILE = attention.TILE
ACTIVATIONS = (F32, F16)


@cache
def backend(mode: str) -> SimulatedBackend:
    return metal_backend(mode, eager=True)


def buffers(sizes: dict[str, tuple[int, ...]], activation: DType) -> list[Buffer]:
    types = {"start": I32, "stop": I32, "lse": F32}
    return [
        Buffer(name, shape, types.get(name, activation), Kind.INPUT)
        for name, shape in sizes.items()
    ]


def calls(n: int, m: int, h: int, g: int, d: int, activation: DType) -> Step:
    """Attention on n queries and m keys, and its gradient on n of each."""
    queries, keys = (n, h, d), (n, g, d)
    live = Buffer("live", (1,), I32, Kind.INPUT)
    step = Step("attention", activation, live)
    sizes = {"q": queries, "k": (m, g, d), "v": (m, g, d), "start": (n,), "stop": (n,)}
    step(ops.attention, *buffers(sizes, activation), scale=1.0)
    sizes = {"do": queries, "q": queries, "k": keys, "v": keys, "o": queries, "lse": (n, h)}
    step(ops.attention_backward, *buffers({**sizes, "start": (n,)}, activation), scale=1.0)
    return step


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    ("n", "m", "h", "g", "d"),
    [(2048, 2048, 16, 8, 128), (8192, 8192, 32, 8, 64), (40000, 40000, 32, 4, 128),
     (1, 131072, 64, 8, 128), (512, 131072, 32, 8, 128), (1, 1, 1, 1, 2)],
)  # fmt: skip
def test_memory_is_bounded(n: int, m: int, h: int, g: int, d: int, activation: DType) -> None:
    """Scores stay within SCORE_BYTES; beside them are sums no larger than q, k and v in float32."""
    for dispatch in lower(calls(n, m, h, g, d, activation).calls, TABLE):
        assert dispatch.workspace is not None
        sums = 4 * n * h * (2 * d + 1)
        assert dispatch.workspace.nbytes <= attention.SCORE_BYTES + sums + 4 * 128 * TILE * TILE
        assert dispatch.row.launches(dispatch.call, dispatch.workspace)  # its pieces fit into it


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("score_bytes", [100_000, 20_000])
def test_scores_in_parts(
    score_bytes: int, activation: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of some heads, then of some rows of one head or group; the last ones are not live."""
    forward, backward = (
        Chosen(case, activation, {"n": 165, "m": 300, "h": 6, "g": 2, "d": 20}, live=140)
        for case in (FORWARD, BACKWARD)
    )
    device, name = backend("checked"), f"attention_keys_{activation}"
    dq = backward.run(device)[0]
    before = device.simulation.executed[name]
    monkeypatch.setattr(attention, "SCORE_BYTES", score_bytes)
    check(forward, device)
    check(backward, device)
    assert device.simulation.executed[name] >= before + 4
    # A row's sum over keys is formed as before.
    np.testing.assert_equal(backward.run(device)[0], dq)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("h", [2, 6, 18])
@pytest.mark.parametrize("m", [70, 700])
def test_one_query_of_many_heads(m: int, h: int, activation: DType) -> None:
    """Of generation: 1, 3 or 9 heads to a key head, in one span of the keys or in several. However
    many heads there are, keys and values are met once, from the first visible tile on."""
    g, d, first, stop, device = 2, 64, m // 2, m - 3, backend("checked")
    bench = Chosen(FORWARD, activation, {"n": 1, "m": m, "h": h, "g": g, "d": d})
    bench.values |= {"start": np.array([first]), "stop": np.array([stop])}
    before = matrix_multiplies(device)
    check(bench, device)
    keys = stop - first // TILE * TILE
    blocks = 4 * -(-h // g // 8)  # of 8 columns by 8 heads
    steps = g * (-(-keys // TILE) * (d // 8) + -(-keys // 8) * (d // TILE))
    assert matrix_multiplies(device) - before == blocks * steps


def matrix_multiplies(device: SimulatedBackend) -> int:
    counters = device.simulation.counters
    return counters["matrix_multiplies"] + counters["matrix_multiplies_other"]


class Document(Chosen):
    """Rows that see from the document's start up to themselves, as in training."""

    def __init__(self, case: Any, activation: DType, starts: np.ndarray, **dims: int):
        n = len(starts)
        super().__init__(case, activation, {"n": n, "m": n, **dims})
        self.values["start"] = starts
        if "stop" in self.values:
            self.values["stop"] = np.arange(1, n + 1)
        elif "lse" in self.values:
            given = [self.values[name] for name in ("q", "k", "v", "start")]
            scale = self.attributes["scale"]
            o, lse = ops.attention.reference(*given, np.arange(1, n + 1), scale=scale)
            (o_parameter,) = (p for p in self.op.inputs if p.name == "o")
            self.values |= {"o": self.round(o, o_parameter), "lse": lse.astype(np.float32)}


def tiles(starts: np.ndarray) -> int:
    """Tiles of scores in which a query sees a key."""
    n = len(starts)
    key, query = np.arange(n), np.arange(n)[:, None]
    seen = (key >= starts[:, None]) & (key <= query)
    edges = np.arange(0, n, TILE)
    return int((np.add.reduceat(np.add.reduceat(seen, edges, 0), edges, 1) > 0).sum())


DOCUMENTS = {
    "causal": np.zeros(160, int),
    "documents": np.repeat([0, 40, 64, 130], [40, 24, 66, 30]),
    "window": np.maximum(np.arange(160) - 20, 0),
    "ragged": np.repeat([0, 70], [70, 63]),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_tiles_in_which_nothing_is_seen_are_not_computed(kind: str) -> None:
    """Multiplications of 8×8 matrices, counted. With 64 columns, each product takes 128 of them for
    a tile of scores of a head, or fewer where the last rows leave a tile unfilled."""
    starts, device = DOCUMENTS[kind], backend("checked")
    count, h = tiles(starts), 3
    for case, products in ((FORWARD, 2), (BACKWARD, 5)):
        before = matrix_multiplies(device)
        check(Document(case, F16, starts, h=h, g=1, d=64), device)
        used = matrix_multiplies(device) - before
        whole = 128 * h * count * products
        assert used == whole if len(starts) % TILE == 0 else used < whole


def test_scores_may_exceed_the_largest_half() -> None:
    bench = Chosen(
        FORWARD, F16, {"n": 40, "m": 40, "h": 2, "g": 1, "d": 64}, attributes={"scale": 1e-5}
    )
    for name in "qk":
        bench.values[name] = np.round(bench.values[name] * 256)
    assert np.abs(np.einsum("nhd,mgd->hnm", bench.values["q"], bench.values["k"])).max() > 2 * 65504
    check(bench, backend("checked"))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_keys_behind_the_last_visible_one_are_not_read(activation: DType) -> None:
    """A cache holds whatever it held before."""
    bench = Chosen(FORWARD, activation, {"n": 5, "m": 90, "h": 4, "g": 2, "d": 40})
    bench.values["stop"] = np.minimum(bench.values["stop"], 61)
    bench.values["start"] = np.minimum(bench.values["start"], 60)
    want = bench.run(backend("checked"))
    for name in "kv":
        bench.values[name] = bench.values[name].copy()
        bench.values[name][61:] = np.nan
    np.testing.assert_equal(bench.run(backend("checked")), want)


def test_masked_probabilities_are_hard_zeros() -> None:
    """Values that a query does not see may be anything finite: not a bit of its output changes."""
    starts, device = DOCUMENTS["documents"], backend("checked")
    bench = Document(FORWARD, F16, starts, h=3, g=1, d=32)
    before = bench.run(device)
    bench.values["v"] = bench.values["v"].copy()
    bench.values["v"][40:64] = 65504
    after = bench.run(device)
    for rows in (slice(0, 40), slice(64, 160)):
        np.testing.assert_equal(after[0][0][rows], before[0][0][rows])
