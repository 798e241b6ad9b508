"""Queues, command buffers and compute encoders, as Metal's validation layer wants them used.

Execution is lazy: a committed buffer runs when somebody waits for it or for one committed later, so
that a host which looks too early sees old values. `Simulation.eager` runs it at once. Either way
launches run one after another; hazards that a concurrent encoder would allow do not show.
"""
# ruff: noqa: N802

from collections.abc import Callable
from math import prod
from typing import Any

from .names import NAMES, Labelled, MetalMisuseError, MetalObject, NSError
from .resources import SimBuffer, SimPipeline, Simulation

CONSTANTS = NAMES["constants"]
NOT_ENQUEUED, ENQUEUED, COMMITTED, SCHEDULED, COMPLETED, ERROR = (
    CONSTANTS[f"MTLCommandBufferStatus{name}"]
    for name in ("NotEnqueued", "Enqueued", "Committed", "Scheduled", "Completed", "Error")
)
LARGEST_BYTES = 4096  # that setBytes takes
BUFFER_INDICES = 31
# Reports that a GPU would not survive, and how its command buffer ends.
FATAL = {
    "fault": CONSTANTS["MTLCommandBufferErrorPageFault"],
    "deadlock": CONSTANTS["MTLCommandBufferErrorTimeout"],
}


def expect(truth: Any, message: str) -> None:
    if not truth:
        raise MetalMisuseError(message)


class CommandQueue(Labelled):
    class_name = "MTLCommandQueue"

    def __init__(self, device: Any, simulation: Simulation, most: int):
        self._device, self._simulation, self._most = device, simulation, most
        self._line: list[CommandBuffer] = []  # enqueued and not yet run, in order

    def device(self) -> Any:
        return self._device

    def commandBuffer(self) -> "CommandBuffer":
        return self._new(execution_status=False)

    def commandBufferWithUnretainedReferences(self) -> "CommandBuffer":
        return self._new(execution_status=False)

    def commandBufferWithDescriptor_(self, descriptor: Any) -> "CommandBuffer":
        wanted = CONSTANTS["MTLCommandBufferErrorOptionEncoderExecutionStatus"]
        return self._new(bool((descriptor.errorOptions() or 0) & wanted))

    def _new(self, execution_status: bool) -> "CommandBuffer":
        if len(self._line) >= self._most:  # Metal waits until one has ended
            self._run_up_to(self._line[0])
        return CommandBuffer(self, self._simulation, execution_status)

    def _run_up_to(self, buffer: "CommandBuffer") -> None:
        while buffer in self._line:
            first = self._line[0]
            expect(first._status >= COMMITTED, "A buffer enqueued earlier was never committed.")
            self._line.remove(first)
            first._run()


class CommandBuffer(Labelled):
    class_name = "MTLCommandBuffer"

    def __init__(self, queue: CommandQueue, simulation: Simulation, execution_status: bool):
        self._queue, self._simulation = queue, simulation
        self._execution_status = execution_status
        self._status = NOT_ENQUEUED
        self._encoders: list[ComputeCommandEncoder] = []
        self._groups = 0
        self._error: NSError | None = None
        self._handlers: list[Callable[[CommandBuffer], None]] = []

    def commandQueue(self) -> CommandQueue:
        return self._queue

    def status(self) -> int:
        return self._status

    def error(self) -> NSError | None:
        return self._error

    def GPUStartTime(self) -> float:
        """Never a time: what runs here is no GPU. Metal says 0 of what has not run."""
        return 0.0

    def GPUEndTime(self) -> float:
        return 0.0

    def pushDebugGroup_(self, name: str) -> None:
        self._groups += 1

    def popDebugGroup(self) -> None:
        expect(self._groups, "popDebugGroup without pushDebugGroup:.")
        self._groups -= 1

    def computeCommandEncoder(self) -> "ComputeCommandEncoder":
        return self.computeCommandEncoderWithDispatchType_(CONSTANTS["MTLDispatchTypeSerial"])

    def computeCommandEncoderWithDispatchType_(self, kind: int) -> "ComputeCommandEncoder":
        expect(self._status < COMMITTED, "An encoder was asked of a committed command buffer.")
        expect(not self._is_encoding(), "A second encoder was asked for while one is open.")
        self._encoders.append(ComputeCommandEncoder(self, self._simulation, kind))
        return self._encoders[-1]

    def _is_encoding(self) -> bool:
        return bool(self._encoders) and self._encoders[-1]._is_open

    def enqueue(self) -> None:
        expect(self._status == NOT_ENQUEUED, "A command buffer was enqueued twice.")
        self._status = ENQUEUED
        self._queue._line.append(self)

    def commit(self) -> None:
        expect(self._status < COMMITTED, "A command buffer was committed twice.")
        expect(not self._is_encoding(), "A command buffer was committed with an open encoder.")
        if self._status == NOT_ENQUEUED:
            self.enqueue()
        self._status = COMMITTED
        if self._simulation.eager:
            self._queue._run_up_to(self)

    def addCompletedHandler_(self, handler: "Callable[[CommandBuffer], None]") -> None:
        expect(self._status < COMMITTED, "A handler was added after the commit.")
        self._handlers.append(handler)

    def waitUntilScheduled(self) -> None:
        expect(self._status >= COMMITTED, "waitUntilScheduled before commit never returns.")

    def waitUntilCompleted(self) -> None:
        expect(self._status >= COMMITTED, "waitUntilCompleted before commit never returns.")
        self._queue._run_up_to(self)

    def _run(self) -> None:
        self._status = COMPLETED
        states = dict.fromkeys(self._encoders, CONSTANTS["MTLCommandEncoderErrorStateCompleted"])
        for encoder in self._encoders:
            if self._error:
                states[encoder] = CONSTANTS["MTLCommandEncoderErrorStatePending"]
                continue
            for dispatch in encoder._dispatches:
                report = self._simulation.run(dispatch, encoder._label or "", FATAL)
                if report:
                    states[encoder] = CONSTANTS["MTLCommandEncoderErrorStateFaulted"]
                    self._fail(report, states)
                    break
        for handler in self._handlers:
            handler(self)

    def _fail(self, report: Any, states: dict["ComputeCommandEncoder", int]) -> None:
        infos = [EncoderInfo(encoder._label, states, encoder) for encoder in self._encoders]
        key = "MTLCommandBufferEncoderInfoErrorKey"
        self._status = ERROR
        self._error = NSError(
            "MTLCommandBufferErrorDomain",
            FATAL[report.kind],
            f"{report.message} at {report.location}",
            {key: infos} if self._execution_status else None,
        )


class EncoderInfo(MetalObject):
    class_name = "MTLCommandBufferEncoderInfo"

    def __init__(self, label: str | None, states: dict[Any, int], encoder: Any):
        self._label, self._states, self._encoder = label, states, encoder

    def label(self) -> str | None:
        return self._label

    def errorState(self) -> int:
        return self._states[self._encoder]


class Dispatch:
    """One dispatch with a copy of what was bound: `groups` counts threadgroups, or threads where
    `counts_threads`."""

    def __init__(self, encoder: "ComputeCommandEncoder", groups: Any, threads: Any, counts: bool):
        assert encoder._pipeline is not None
        self.pipeline: SimPipeline = encoder._pipeline
        self.arguments = dict(encoder._arguments)
        self.threadgroup_bytes = dict(encoder._threadgroup_bytes)
        self.groups, self.threads, self.counts_threads = tuple(groups), tuple(threads), counts


class ComputeCommandEncoder(Labelled):
    class_name = "MTLComputeCommandEncoder"

    def __init__(self, buffer: CommandBuffer, simulation: Simulation, kind: int):
        self._buffer, self._simulation, self._kind = buffer, simulation, kind
        self._is_open = True
        self._pipeline: SimPipeline | None = None
        self._arguments: dict[int, tuple[SimBuffer, int] | bytes] = {}
        self._threadgroup_bytes: dict[int, int] = {}
        self._dispatches: list[Dispatch] = []
        self._groups = 0

    def dispatchType(self) -> int:
        return self._kind

    def setComputePipelineState_(self, pipeline: SimPipeline) -> None:
        self._expect_open()
        expect(isinstance(pipeline, SimPipeline), f"{pipeline!r} is no pipeline.")
        self._pipeline = pipeline

    def setBuffer_offset_atIndex_(self, buffer: SimBuffer | None, offset: int, index: int) -> None:
        self._expect_index(index)
        if buffer is None:
            self._arguments.pop(index, None)
            return
        expect(isinstance(buffer, SimBuffer), f"{buffer!r} is no buffer.")
        expect(
            0 <= offset < buffer.length(),
            f"Offset {offset} is not inside a buffer of {buffer.length()} bytes.",
        )
        self._arguments[index] = (buffer, offset)

    def setBufferOffset_atIndex_(self, offset: int, index: int) -> None:
        old = self._arguments.get(index)
        expect(isinstance(old, tuple), f"No buffer is bound at index {index}.")
        assert isinstance(old, tuple)
        self.setBuffer_offset_atIndex_(old[0], offset, index)

    def setBytes_length_atIndex_(self, content: Any, length: int, index: int) -> None:
        self._expect_index(index)
        if length > memoryview(content).nbytes:  # PyObjC looks before Metal does
            raise ValueError(
                f"Requesting buffer of {length}, have buffer of {memoryview(content).nbytes}"
            )
        expect(0 < length <= LARGEST_BYTES, f"setBytes: takes 1 to 4096 bytes, got {length}.")
        self._arguments[index] = bytes(memoryview(content).cast("B")[:length])

    def setThreadgroupMemoryLength_atIndex_(self, length: int, index: int) -> None:
        self._expect_index(index)
        expect(length % 16 == 0, f"Threadgroup memory comes in multiples of 16 bytes: {length}.")
        self._threadgroup_bytes[index] = length

    def dispatchThreadgroups_threadsPerThreadgroup_(self, groups: Any, threads: Any) -> None:
        self._dispatch(groups, threads, counts_threads=False)

    def dispatchThreads_threadsPerThreadgroup_(self, total: Any, threads: Any) -> None:
        self._dispatch(total, threads, counts_threads=True)

    def memoryBarrierWithScope_(self, scope: int) -> None:
        self._expect_open()
        expect(scope == CONSTANTS["MTLBarrierScopeBuffers"], f"{scope} is no scope for compute.")

    def insertDebugSignpost_(self, name: str) -> None:
        self._expect_open()

    def pushDebugGroup_(self, name: str) -> None:
        self._expect_open()
        self._groups += 1

    def popDebugGroup(self) -> None:
        self._expect_open()
        expect(self._groups, "popDebugGroup without pushDebugGroup:.")
        self._groups -= 1

    def endEncoding(self) -> None:
        self._expect_open()
        expect(not self._groups, "endEncoding inside a debug group.")
        self._is_open = False

    def _dispatch(self, groups: Any, threads: Any, counts_threads: bool) -> None:
        self._expect_open()
        expect(self._pipeline is not None, "A dispatch without a pipeline.")
        assert self._pipeline is not None
        expect(len(groups) == len(threads) == 3, "A grid has three sizes.")
        expect(all(groups) and all(threads), f"An empty grid: {groups} of {threads} threads.")
        most = self._pipeline.maxTotalThreadsPerThreadgroup()
        expect(
            prod(threads) <= most,
            f"{prod(threads)} threads in a threadgroup; {self._pipeline._name} allows {most}.",
        )
        used = self._pipeline.staticThreadgroupMemoryLength()
        used += sum(self._threadgroup_bytes.values())
        limit = self._simulation.threadgroup_memory
        expect(used <= limit, f"{used} bytes of threadgroup memory; the limit is {limit}.")
        missing = ", ".join(self._pipeline._missing(self._arguments, self._threadgroup_bytes))
        expect(not missing, f"{self._pipeline._name} has nothing bound for {missing}.")
        self._dispatches.append(Dispatch(self, groups, threads, counts_threads))

    def _expect_open(self) -> None:
        expect(self._is_open, "Encoding after endEncoding.")

    def _expect_index(self, index: int) -> None:
        self._expect_open()
        expect(0 <= index < BUFFER_INDICES, f"Index {index} is beyond the 31 that Metal has.")
