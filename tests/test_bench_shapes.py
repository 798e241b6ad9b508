"""The table of products of models' layers: what is timed is right, comes from memory, and is what a
peer computes too; ratios and their means are those of the seconds."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench_worker import write_worker
from cudasim.backend import HOPPER, SimulatedCudaBackend
from krnl.backends.base import Backend, Memory
from krnl.backends.cpu import CpuBackend, CpuProgram
from krnl.bench import rotation
from krnl.bench.baselines import AGREEMENT, Worker
from krnl.bench.command import Bench
from krnl.bench.products import Product
from krnl.bench.rotation import Rotation
from krnl.bench.tables import shapes
from krnl.bench.workloads import BlockShape
from krnl.devices import precision_name
from krnl.dtypes import BF16, F32
from krnl.errors import BackendError
from krnl.plan.arena import Plan
from metalsim.install import metal_backend
from open_gate import OpenGate
from timed_gate import TimedGate

LAYOUTS = ("nn", "tn", "nt")


def bench(gate: Any = None, **against: str) -> Bench:
    return Bench(CpuBackend(), gate or OpenGate(), 2, True, against)


# A rotation


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated devices take their time."""
    monkeypatch.setattr(rotation, "MOST_COPIES", 2)
    monkeypatch.setattr(rotation, "LEAST_CALLS", 3)


@pytest.mark.parametrize(
    ("side", "dtype", "copies", "calls"),
    [(8, BF16, 20, 20), (2048, BF16, 12, 24), (2048, F32, 6, 24), (4096, BF16, 3, 21)],
)
def test_copies_make_more_than_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch, side: int, dtype: Any, copies: int, calls: int
) -> None:
    result = np.ones((2, 2))
    monkeypatch.setattr(rotation, "checked", lambda *given: (None, None, result))
    made = Rotation(Product("nt", side, side, side, dtype, dtype), CpuBackend())
    assert (made.copies, made.calls) == (copies, calls)
    if copies < 20:
        assert (copies - 1) * 2 * side * side * dtype.size < 200e6
        assert copies * 2 * side * side * dtype.size >= 200e6


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_cache_holds_all_copies(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: Any
) -> None:
    """Of every shape of the table but the small ones."""
    monkeypatch.setattr(rotation, "checked", lambda *given: (None, None, np.ones((2, 2))))
    gpu: Any = type("Gpu", (), {"name": device})
    found = shapes.shapes(gpu, quick=False)
    assert found
    for shape in found:
        made = Rotation(
            Product(shape.layout, shape.m, shape.n, shape.k, dtype, dtype), CpuBackend()
        )
        operands = shape.k * (shape.m + shape.n) * dtype.size
        assert made.copies * operands >= 200e6
        assert made.calls >= made.copies and made.calls % made.copies == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_every_call_takes_the_next_copy_and_all_hold_the_same(
    monkeypatch: pytest.MonkeyPatch, few: None, layout: str, dtype: Any
) -> None:
    seen: list[Any] = []
    right = rotation.checked

    def checked(step: Any, calls: Any, *rest: Any) -> Any:
        program, memory, result = right(step, calls, *rest)
        seen.extend((calls, memory))
        return program, memory, result

    monkeypatch.setattr(rotation, "checked", checked)
    made = Rotation(Product(layout, 24, 40, 56, dtype, dtype), CpuBackend())
    calls, memory = seen
    assert len(calls) == made.calls == 4
    by_name = [{buffer.name: buffer for buffer in call.reads()} for call in calls]
    for name in "ab":
        one, two, three, four = (buffers[name] for buffers in by_name)
        assert one is three and two is four and one is not two
        np.testing.assert_array_equal(memory.read(one), memory.read(two))
        assert np.any(memory.read(one) != 0)
    assert len({call.outputs for call in calls}) == 1
    assert made.turn() > 0


def test_seconds_are_those_of_a_product(monkeypatch: pytest.MonkeyPatch, few: None) -> None:
    monkeypatch.setattr(rotation, "replayed", lambda *given: 0.008)
    assert Rotation(Product("nn", 8, 8, 8, F32, F32), CpuBackend()).turn() == 0.002


class Changed(CpuBackend):
    """Its programs are made of other dispatches than those that were planned."""

    def __init__(self, change: Callable[[list[Any]], list[Any]]):
        super().__init__()
        self._change = change
        self.compiled = 0

    def compile(self, plan: Plan, memory: Memory) -> CpuProgram:
        self.compiled += 1
        return super().compile(replace(plan, dispatches=self._change(plan.dispatches)), memory)


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        ("nn", lambda dispatches: []),
        ("nt", lambda dispatches: []),
        ("tn", lambda dispatches: []),
        ("tn", lambda dispatches: dispatches[:-1]),
        ("tn", lambda dispatches: [*dispatches, dispatches[0]]),
    ],
    ids=["nn nothing", "nt nothing", "tn nothing", "tn one fewer", "tn one more"],
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_what_is_timed_is_what_is_checked(few: None, layout: str, change: Any, dtype: Any) -> None:
    """The program of all calls, not another that is like it."""
    product = Product(layout, 24, 40, 56, dtype, dtype)
    unchanged = Changed(lambda dispatches: dispatches)
    assert Rotation(product, unchanged).calls == 4 and unchanged.compiled == 1
    with pytest.raises(BackendError, match="elements are wrong"):
        Rotation(product, Changed(change))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_copy_of_the_operands_is_found(
    monkeypatch: pytest.MonkeyPatch, few: None, layout: str
) -> None:
    """Whether products are added up or the last alone is left."""
    memory = CpuBackend.allocate

    def allocate(self: CpuBackend, layout: Any) -> Any:
        made = memory(self, layout)
        write, seen = made.write, list[Any]()

        def wrong(buffer: Any, values: Any) -> None:
            seen.append(buffer.name)
            write(buffer, 1.1 * values if seen.count("a") == 2 and buffer.name == "a" else values)

        made.write = wrong
        return made

    monkeypatch.setattr(CpuBackend, "allocate", allocate)
    with pytest.raises(BackendError, match="elements are wrong"):
        Rotation(Product(layout, 24, 40, 56, F32, F32), CpuBackend())


SIMULATED: dict[str, Callable[[], Backend]] = {
    "metal": lambda: metal_backend("fast"),
    "cuda": lambda: SimulatedCudaBackend(HOPPER),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SIMULATED)
def test_a_gpu_computes_what_is_timed(
    monkeypatch: pytest.MonkeyPatch, few: None, name: str, layout: str
) -> None:
    """In the simulators, of which no time is ever taken."""
    backend = SIMULATED[name]()
    monkeypatch.setattr(rotation, "enough", lambda backend, run: 2)
    dtype = backend.limits.activations[0]
    made = Rotation(Product(layout, 32, 64, 48, dtype, dtype), backend)
    assert made.turn() > 0
    on_cpu = Rotation(Product(layout, 32, 64, 48, F32, F32), CpuBackend())
    assert made.norm == pytest.approx(on_cpu.norm, rel=AGREEMENT)
    # Both factors of 48 terms of about 1 are rounded, and so is the sum.
    np.testing.assert_allclose(made.row, on_cpu.row, rtol=dtype.eps, atol=48 * dtype.eps)


# The table


def test_the_shapes_are_those_of_layers_in_every_layout() -> None:
    block = BlockShape()
    gpu: Any = type("Gpu", (), {"name": "cuda"})
    found = shapes.shapes(gpu, quick=False)
    for rows in (512, 4096):
        sizes = {(s.layout, s.n, s.k) for s in found if s.group == f"{rows:,} rows"}
        assert sizes == {
            ("nt", 2 * block.ffn, block.width), ("nn", block.ffn, block.width),
            ("nt", block.width, block.ffn), ("nn", block.width, 2 * block.ffn),
            ("nt", block.width, block.width),
        }  # fmt: skip
        assert all(s.m == rows for s in found if s.group == f"{rows:,} rows")
    assert {s.layout for s in found} == set(LAYOUTS)
    assert len(set(found)) == len({s.ours for s in found}) == 15
    assert shapes.shapes(CpuBackend(), quick=False) == found[:5]
    assert {s.flops * 16**3 for s in shapes.shapes(gpu, quick=True)} == {s.flops for s in found}


def test_krnl_alone() -> None:
    result = shapes.run(bench())
    assert [entry.name for entry in result.entries] == [
        shape.ours for shape in shapes.shapes(CpuBackend(), quick=True)
    ]
    assert all(entry.value and entry.ratio is None for entry in result.entries)


def test_rates_ratios_and_their_mean_are_those_of_the_seconds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """KRNL takes one, three, five ms and so on, a peer a millisecond more each time."""
    body = "serve(options, dict, describe=lambda: {'norm': 1.0, 'row': []})"
    worker = write_worker(tmp_path, body)
    monkeypatch.setattr(shapes, "script", lambda name: worker)
    monkeypatch.setattr(shapes, "check", lambda *given: None)
    result = shapes.run(bench(TimedGate(), torch=sys.executable))
    *lines, mean = result.entries
    found = shapes.shapes(CpuBackend(), quick=True)
    ratios = []
    for i, (shape, ours, theirs) in enumerate(zip(found, lines[::2], lines[1::2], strict=True)):
        flops = 2 * shape.m * shape.n * shape.k
        assert ours.value == pytest.approx(flops / (2 * i + 1) / 1e6)
        assert theirs.value == pytest.approx(flops / (2 * i + 2) / 1e6)
        assert (ours.unit, theirs.ratio) == ("GFLOP/s", None)
        ratios.append((2 * i + 2) / (2 * i + 1))
        assert ours.ratio == pytest.approx(ratios[-1])
    assert mean.value == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))
    assert (mean.name, mean.note) == ("mean ratio, 32 rows", "geometric, of 5 shapes")


def test_means_are_of_each_group_and_of_all() -> None:
    made = [shapes.Shape(group, "nn", 1, 1, k) for group in "ab" for k in (1, 2)]
    means = shapes.means(dict(zip(made, (0.5, 2.0, 3.0, 12.0), strict=True)))
    assert [(mean.name.split(", ")[1], mean.value, mean.note) for mean in means] == [
        ("a", pytest.approx(1.0), "geometric, of 2 shapes"),
        ("b", pytest.approx(6.0), "geometric, of 2 shapes"),
        ("all", pytest.approx(6**0.5), "geometric, of 4 shapes"),
    ]
    assert shapes.means({}) == []


@pytest.mark.parametrize("device", ["cuda", "metal"])
def test_ratios_of_what_is_unlike_are_in_no_mean(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str
) -> None:
    """On CUDA both sides add tn to a sum; elsewhere PyTorch writes it once."""
    backend = CpuBackend()
    backend.name = device
    body = "serve(options, dict, describe=lambda: {'norm': 1.0, 'row': []})"
    worker = write_worker(tmp_path, body)
    monkeypatch.setattr(shapes, "script", lambda name: worker)
    monkeypatch.setattr(shapes, "check", lambda *given: None)
    monkeypatch.setattr(shapes, "ROWS", (512,))
    monkeypatch.setattr(shapes, "LAYERS", (("nt", 1024, 1024),))
    monkeypatch.setattr(shapes, "OTHERS", (("tn", 512, 512, 512), ("nn", 512, 512, 512)))
    monkeypatch.setattr(rotation, "enough", lambda backend, run: 1)
    asked = replace(bench(TimedGate(), torch=sys.executable), backend=backend)
    entries = {entry.name: entry for entry in shapes.run(asked).entries}
    nt, tn, nn = 2 / 1, 4 / 3, 6 / 5  # TimedGate's milliseconds
    ours, theirs = (entries[f"tn, 32 × 32 × 32, {who}"] for who in ("krnl", "torch"))
    assert ours.ratio == pytest.approx(tn)
    added = "added to a sum in fp32"
    precision = precision_name(backend.limits.activations[0])
    if device == "cuda":
        assert (ours.note, theirs.note) == (f"{added}; ratio to torch", added)
        others = [tn, nn]
    else:
        assert ours.note == f"{added}; ratio to torch, which is in no mean"
        assert theirs.note == f"written once, in {precision}"
        others = [nn]
    for name, ratios in (("squares and a gradient", others), ("all", [nt, *others])):
        mean = entries[f"mean ratio, {name}"]
        assert mean.value == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))
        assert mean.note == f"geometric, of {len(ratios)} shapes"
    assert entries["nn, 32 × 32 × 32, torch"].note == ""


def test_no_worker_runs_while_krnl_times_what_a_turn_is_made_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And no worker outlives the table, whoever fails."""
    done: list[str] = []
    processes: list[Any] = []
    made, start = Rotation, shapes.start

    def building(product: Product, backend: Backend) -> Rotation:
        done.append("built")
        return made(product, backend)

    def starting(*given: Any, **options: Any) -> Worker:
        done.append("started")
        worker = start(*given, **options)
        processes.append(worker._process)
        return worker

    def unlike(*given: Any) -> None:
        done.append("checked")
        raise BackendError("unlike")

    worker = write_worker(
        tmp_path, "serve(options, dict, describe=lambda: {'norm': 1.0, 'row': []})"
    )
    monkeypatch.setattr(shapes, "script", lambda name: worker)
    for name, stand_in in (("Rotation", building), ("start", starting), ("check", unlike)):
        monkeypatch.setattr(shapes, name, stand_in)
    with pytest.raises(BackendError, match="unlike"):
        shapes.run(bench(TimedGate(), torch=sys.executable))
    count = len(shapes.shapes(CpuBackend(), quick=True))
    assert done == [*["built"] * count, *["started"] * count, "checked"]
    assert len(processes) == count
    assert all(process.poll() is not None for process in processes)


def test_a_peer_is_told_what_to_multiply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[list[str]] = []
    body = "serve(options, dict, describe=lambda: {'norm': 1.0, 'row': sys.argv[1:]})"
    worker = write_worker(tmp_path, body)
    monkeypatch.setattr(shapes, "script", lambda name: worker)
    monkeypatch.setattr(shapes, "check", lambda name, hello, made: told.append(hello["row"]))
    shapes.run(bench(TimedGate(), torch=sys.executable))
    for given, shape in zip(told, shapes.shapes(CpuBackend(), quick=True), strict=True):
        options = dict(zip(given[::2], given[1::2], strict=True))
        assert options["--layout"] == shape.layout
        assert [int(options[f"--{x}"]) for x in "mnk"] == [shape.m, shape.n, shape.k]
        wanted = {"--copies": "20", "--calls": "20", "--repeats": "1", "--device": "cpu"}
        assert wanted.items() <= options.items()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda norm, row: (norm, row), None),
        (lambda norm, row: (1.02 * norm, row), "the norm of the product"),
        (lambda norm, row: (float("nan"), row), "the norm of the product"),
        (lambda norm, row: (norm, row[::-1]), "its first row"),
        (lambda norm, row: (norm, [0.98 * value for value in row]), "its first row"),
    ],
)
def test_another_product_is_not_compared(change: Any, complaint: str | None) -> None:
    made = Rotation(Product("nt", 24, 40, 56, F32, F32), CpuBackend())
    norm, row = change(made.norm, made.row[:16])
    if complaint is None:
        shapes.check("torch", {"norm": norm, "row": row}, made)
        return
    with pytest.raises(BackendError, match=f"torch computes something else than KRNL: {complaint}"):
        shapes.check("torch", {"norm": norm, "row": row}, made)
