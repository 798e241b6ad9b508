"""The stand-in for PyObjC's Metal: it has Metal's names only, and refuses what Metal refuses."""

import ast
import ctypes
import inspect
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import krnl.backends.metal
import krnl.backends.metal_memory
from metalsim import commands, metal, names, resources
from metalsim.metal import metal_module
from metalsim.names import NAMES, MetalMisuseError, MetalObject, selectors
from metalsim.resources import Simulation

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant uint repeats [[function_constant(0)]];
constant bool negative [[function_constant(1)]];

kernel void add(device float *y [[buffer(0)]], constant float &x [[buffer(1)]],
                uint i [[thread_position_in_grid]]) {
  y[i] += negative ? -x * float(repeats) : x * float(repeats);
}

kernel void overrun(device float *y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[i + 100000000u] = 1.0f;
}
"""
SHARED = NAMES["constants"]["MTLResourceStorageModeShared"]
PRIVATE = NAMES["constants"]["MTLResourceStorageModePrivate"]
DRIVER = (krnl.backends.metal, krnl.backends.metal_memory)


class Host:
    """The calls that any program makes first."""

    def __init__(self, **settings: Any):
        self.simulation = Simulation(**settings)
        self.metal: Any = metal_module(self.simulation)
        self.device = self.metal.MTLCreateSystemDefaultDevice()
        self.queue = self.device.newCommandQueue()
        self.library, error = self.device.newLibraryWithSource_options_error_(SOURCE, None, None)
        assert error is None, error.localizedDescription()

    def buffer(self, values: Any) -> Any:
        array = np.asarray(values, np.float32)
        return self.device.newBufferWithBytes_length_options_(array, array.nbytes, SHARED)

    def pipeline(self, name: str = "add", step: int = 1, negative: bool = False) -> Any:
        values = self.metal.MTLFunctionConstantValues.alloc().init()
        self.set(values, ctypes.c_uint(step), self.metal.MTLDataTypeUInt, 0)
        self.set(values, ctypes.c_bool(negative), self.metal.MTLDataTypeBool, 1)
        function, error = self.library.newFunctionWithName_constantValues_error_(name, values, None)
        assert error is None, error.localizedDescription()
        pipeline, error = self.device.newComputePipelineStateWithFunction_error_(function, None)
        assert error is None
        return pipeline

    @staticmethod
    def set(values: Any, content: Any, kind: int, index: int) -> None:
        values.setConstantValue_type_atIndex_(ctypes.addressof(content), kind, index)

    def encode(self, encoder: Any, buffer: Any, threads: int = 32, **given: Any) -> None:
        size = self.metal.MTLSizeMake
        encoder.setComputePipelineState_(self.pipeline(**given))
        encoder.setBuffer_offset_atIndex_(buffer, 0, 0)
        encoder.setBytes_length_atIndex_(np.float32(1).tobytes(), 4, 1)
        encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(1, 1, 1), size(threads, 1, 1))


def floats(buffer: Any) -> np.ndarray:
    return np.frombuffer(buffer.contents().as_buffer(buffer.length()), np.float32)


@pytest.fixture
def host() -> Host:
    return Host()


# Names


PARTS = (MetalObject, names.Labelled, names.Properties)  # of other classes
CLASSES = [
    cls
    for module in (commands, metal, names, resources)
    for cls in vars(module).values()
    if isinstance(cls, type) and issubclass(cls, MetalObject) and cls.__module__ == module.__name__
    if cls not in PARTS
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_method_is_a_selector_of_metal(cls: type[MetalObject]) -> None:
    for name in dir(cls):
        if name.startswith("_") or name in ("alloc", "init", "class_name"):
            continue
        selector = name.replace("_", ":")
        introduced = selectors(cls.class_name).get(selector)
        assert introduced is not None, f"-[{cls.class_name} {selector}]"
        assert names.is_here(introduced), f"{selector} came with macOS {introduced}"
        parameters = inspect.signature(getattr(cls, name)).parameters
        assert len(parameters) - 1 == selector.count(":"), selector
        returns_error = selector in NAMES["returns arguments"]
        assert returns_error == selector.endswith("error:"), selector


@pytest.mark.parametrize("module", DRIVER, ids=lambda module: module.__name__)
def test_every_name_that_the_driver_uses_is_one_of_metal(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text("utf-8"))
    known = {s: v for name in NAMES["classes"] for s, v in selectors(name).items()}
    known |= {s: "" for name in names.FOUNDATION for s in selectors(name)}
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    constants = {name for name in used if name.startswith("MTL")}
    everything = [*NAMES["constants"], *NAMES["strings"], *NAMES["functions"], *NAMES["classes"]]
    assert constants <= set(everything)
    # A selector with arguments has an underscore at its end; pipelines are asked by plain names.
    for name in {name for name in used if name.endswith("_") and not name.startswith("_")}:
        selector = name.replace("_", ":")
        assert selector in known, selector
        assert names.is_here(known[selector]), selector
    assert module is not krnl.backends.metal or len(constants) > 10


def test_the_simulator_offers_what_the_wheel_has() -> None:
    assert NAMES["wheel"].startswith("pyobjc_framework_metal-")
    host = Host()
    assert host.metal.MTLResourceStorageModePrivate == 32
    assert host.metal.MTLDataTypeBool == 53
    assert host.metal.MTLSizeMake(1, 2, 3).height == 2
    assert host.metal.MTLCopyAllDevices() == [host.device]


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda h: h.metal.MTLResourceStorageModeFast, "Metal has no MTLResourceStorageModeFast"),
        (lambda h: h.metal.MTLComputePipelineDescriptor, "The simulator has no MTLComputePipeline"),
        (lambda h: h.device.newBuffer_(4), r"Metal has no -\[MTLDevice newBuffer:\]"),
        (lambda h: h.device.newTextureWithDescriptor_(0), r"The simulator lacks -\[MTLDevice newT"),
        (lambda h: h.queue.commit(), r"Metal has no -\[MTLCommandQueue commit\]"),
        (
            lambda h: h.metal.MTLCompileOptions.alloc().init().setMathMode_(0),
            "setMathMode:. came with macOS 15.0; this is 14.0",
        ),
    ],
)
def test_names_that_metal_does_not_have(host: Host, use: Any, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        use(host)


def test_the_device_says_what_it_is(host: Host) -> None:
    assert "simulator" in host.device.name()
    assert host.device.supportsFamily_(host.metal.MTLGPUFamilyApple7)
    assert not host.device.supportsFamily_(host.metal.MTLGPUFamilyApple8)
    assert host.device.maxThreadgroupMemoryLength() == 32768
    assert host.device.hasUnifiedMemory()


# Execution


def test_a_buffer_runs_only_when_it_is_waited_for(host: Host) -> None:
    y = host.buffer(np.zeros(32))
    command_buffers = []
    for _ in range(2):
        command_buffers.append(host.queue.commandBuffer())
        encoder = command_buffers[-1].computeCommandEncoder()
        host.encode(encoder, y, step=3)
        encoder.endEncoding()
        command_buffers[-1].commit()
    assert not floats(y).any()
    assert command_buffers[0].status() == host.metal.MTLCommandBufferStatusCommitted
    command_buffers[1].waitUntilCompleted()
    assert (floats(y) == 6).all(), "what was committed earlier runs first"
    assert command_buffers[0].status() == host.metal.MTLCommandBufferStatusCompleted
    assert host.simulation.executed == {"add": 2}
    assert host.simulation.counters["device_stores"] == 64


def test_an_eager_device_runs_at_commit() -> None:
    host = Host(eager=True)
    y = host.buffer(np.zeros(32))
    command_buffer = host.queue.commandBuffer()
    done: list[Any] = []
    command_buffer.addCompletedHandler_(done.append)
    encoder = command_buffer.computeCommandEncoder()
    host.encode(encoder, y, step=2, negative=True)
    encoder.endEncoding()
    command_buffer.commit()
    assert (floats(y) == -2).all()
    assert done == [command_buffer]


def test_a_queue_holds_only_so_many_command_buffers(host: Host) -> None:
    queue = host.device.newCommandQueueWithMaxCommandBufferCount_(1)
    y = host.buffer(np.zeros(32))
    first = queue.commandBuffer()
    encoder = first.computeCommandEncoder()
    host.encode(encoder, y)
    encoder.endEncoding()
    first.commit()
    queue.commandBuffer()
    assert (floats(y) == 1).all(), "Metal waits for a free place"


def test_the_simulator_never_tells_a_time(host: Host) -> None:
    command_buffer = host.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    host.encode(encoder, host.buffer(np.zeros(32)))
    encoder.endEncoding()
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    assert command_buffer.GPUStartTime() == command_buffer.GPUEndTime() == 0


def test_arguments_are_those_of_the_moment_of_the_dispatch(host: Host) -> None:
    first, second = host.buffer(np.zeros(32)), host.buffer(np.zeros(64))
    command_buffer = host.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    host.encode(encoder, first)
    encoder.setBuffer_offset_atIndex_(second, 128, 0)
    size = host.metal.MTLSizeMake
    encoder.dispatchThreads_threadsPerThreadgroup_(size(20, 1, 1), size(32, 1, 1))
    encoder.endEncoding()
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    assert (floats(first) == 1).all()
    assert (floats(second) == [0.0] * 32 + [1.0] * 20 + [0.0] * 12).all()


def test_a_fault_ends_its_command_buffer() -> None:
    host = Host(mode="fast")  # checked builds report an overrun and go on
    descriptor = host.metal.MTLCommandBufferDescriptor.alloc().init()
    descriptor.setErrorOptions_(host.metal.MTLCommandBufferErrorOptionEncoderExecutionStatus)
    command_buffer = host.queue.commandBufferWithDescriptor_(descriptor)
    y = host.buffer(np.zeros(32))
    for label, name in (("first", "add"), ("second", "overrun"), ("third", "add")):
        encoder = command_buffer.computeCommandEncoder()
        encoder.setLabel_(label)
        host.encode(encoder, y, name=name)
        encoder.endEncoding()
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    assert command_buffer.status() == host.metal.MTLCommandBufferStatusError
    error = command_buffer.error()
    assert error.domain() == host.metal.MTLCommandBufferErrorDomain
    assert error.code() == host.metal.MTLCommandBufferErrorPageFault
    infos = error.userInfo().objectForKey_(host.metal.MTLCommandBufferEncoderInfoErrorKey)
    states = ("Completed", "Faulted", "Pending")
    assert [(info.label(), info.errorState()) for info in infos] == [
        (label, getattr(host.metal, f"MTLCommandEncoderErrorState{state}"))
        for label, state in zip(("first", "second", "third"), states, strict=True)
    ]
    assert (floats(y) == 1).all(), "only the first encoder ran"


def test_host_memory_becomes_a_buffer_without_a_copy(host: Host) -> None:
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float32)
    y = host.device.newBufferWithBytesNoCopy_length_options_deallocator_(
        memory, memory.nbytes, SHARED, None
    )
    assert floats(y).ctypes.data == memory.ctypes.data
    command_buffer = host.queue.commandBuffer()
    encoder = command_buffer.computeCommandEncoder()
    host.encode(encoder, y)
    encoder.endEncoding()
    command_buffer.commit()
    command_buffer.waitUntilCompleted()
    assert (memory[:32] == 1).all() and not memory[32:].any()


# Misuse


def open_encoder(host: Host) -> Any:
    return host.queue.commandBuffer().computeCommandEncoder()


def commit_twice(host: Host) -> None:
    command_buffer = host.queue.commandBuffer()
    command_buffer.commit()
    command_buffer.commit()


def encode_after_commit(host: Host) -> None:
    command_buffer = host.queue.commandBuffer()
    command_buffer.commit()
    command_buffer.computeCommandEncoder()


def commit_while_encoding(host: Host) -> None:
    command_buffer = host.queue.commandBuffer()
    command_buffer.computeCommandEncoder()
    command_buffer.commit()


def two_encoders(host: Host) -> None:
    command_buffer = host.queue.commandBuffer()
    command_buffer.computeCommandEncoder()
    command_buffer.computeCommandEncoder()


def handler_after_commit(host: Host) -> None:
    command_buffer = host.queue.commandBuffer()
    command_buffer.commit()
    command_buffer.addCompletedHandler_(print)


def wait_behind_an_uncommitted_one(host: Host) -> None:
    """It is first in the queue, and never comes."""
    first, second = host.queue.commandBuffer(), host.queue.commandBuffer()
    first.enqueue()
    second.commit()
    second.waitUntilCompleted()


def enqueue_twice(host: Host) -> None:
    command_buffer = host.queue.commandBuffer()
    command_buffer.enqueue()
    command_buffer.enqueue()


def no_pipeline(host: Host) -> None:
    size = host.metal.MTLSizeMake
    open_encoder(host).dispatchThreadgroups_threadsPerThreadgroup_(size(1, 1, 1), size(1, 1, 1))


def bind(host: Host, buffer: Any, offset: int, index: int) -> None:
    open_encoder(host).setBuffer_offset_atIndex_(buffer, offset, index)


def no_binding(host: Host) -> None:
    encoder, size = open_encoder(host), host.metal.MTLSizeMake
    encoder.setComputePipelineState_(host.pipeline())
    encoder.setBuffer_offset_atIndex_(host.buffer(np.zeros(32)), 0, 0)
    encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(1, 1, 1), size(32, 1, 1))


def empty_grid(host: Host) -> None:
    encoder, size = open_encoder(host), host.metal.MTLSizeMake
    encoder.setComputePipelineState_(host.pipeline())
    encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(0, 1, 1), size(32, 1, 1))


def map_memory(host: Host, start: int, length: int, options: int = SHARED) -> None:
    memory = np.frombuffer(mmap.mmap(-1, 2 * mmap.PAGESIZE), np.uint8)[start:]
    host.device.newBufferWithBytesNoCopy_length_options_deallocator_(memory, length, options, None)


def too_much_threadgroup_memory(host: Host) -> None:
    encoder = open_encoder(host)
    encoder.setThreadgroupMemoryLength_atIndex_(32784, 0)
    host.encode(encoder, host.buffer([1]))


def flat_grid(host: Host) -> None:
    encoder = open_encoder(host)
    encoder.setComputePipelineState_(host.pipeline())
    encoder.dispatchThreadgroups_threadsPerThreadgroup_((1,), (32, 1, 1))


def unknown_constant_type(host: Host) -> None:
    values = host.metal.MTLFunctionConstantValues.alloc().init()
    host.set(values, ctypes.c_float(1), host.metal.MTLDataTypeFloat4, 0)


def unbalanced_group(host: Host) -> None:
    encoder = open_encoder(host)
    encoder.pushDebugGroup_("layer")
    encoder.endEncoding()


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (commit_twice, "committed twice"),
        (encode_after_commit, "asked of a committed command buffer"),
        (commit_while_encoding, "committed with an open encoder"),
        (two_encoders, "while one is open"),
        (handler_after_commit, "after the commit"),
        (wait_behind_an_uncommitted_one, "never committed"),
        (enqueue_twice, "enqueued twice"),
        (lambda h: h.queue.commandBuffer().waitUntilCompleted(), "before commit"),
        (lambda h: h.queue.commandBuffer().waitUntilScheduled(), "before commit"),
        (lambda h: h.queue.commandBuffer().popDebugGroup(), "without pushDebugGroup"),
        (lambda h: open_encoder(h).popDebugGroup(), "without pushDebugGroup"),
        (lambda h: open_encoder(h).setComputePipelineState_(None), "is no pipeline"),
        (lambda h: open_encoder(h).setBufferOffset_atIndex_(0, 3), "bound at index 3"),
        (lambda h: open_encoder(h).setBytes_length_atIndex_(b"1234", 4, 31), "Index 31"),
        (lambda h: open_encoder(h).setThreadgroupMemoryLength_atIndex_(16, -1), "Index -1"),
        (lambda h: open_encoder(h).memoryBarrierWithScope_(2), "no scope for compute"),
        (lambda h: h.buffer([1]).contents().as_buffer(5), "5 bytes of a buffer of 4"),
        (too_much_threadgroup_memory, "32784 bytes of threadgroup memory; the limit is 32768"),
        (flat_grid, "three sizes"),
        (unknown_constant_type, "no function constants of data type"),
        (no_pipeline, "without a pipeline"),
        (no_binding, "add has nothing bound for x"),
        (empty_grid, "An empty grid"),
        (unbalanced_group, "inside a debug group"),
        (lambda h: h.encode(open_encoder(h), h.buffer([1]), threads=1056), "1056 threads"),
        (lambda h: bind(h, h.buffer([1]), 4, 0), "Offset 4 is not inside a buffer of 4 bytes"),
        (lambda h: bind(h, h.buffer([1]), 0, 31), "Index 31"),
        (lambda h: bind(h, np.zeros(4), 0, 0), "is no buffer"),
        (lambda h: open_encoder(h).setBytes_length_atIndex_(bytes(5000), 4097, 0), "4097"),
        (
            lambda h: open_encoder(h).setThreadgroupMemoryLength_atIndex_(20, 0),
            "multiples of 16 bytes",
        ),
        (lambda h: map_memory(h, 16, mmap.PAGESIZE), "no start of a page"),
        (lambda h: map_memory(h, 0, 100), "no whole pages"),
        (lambda h: map_memory(h, 0, 0), "no bytes"),
        (lambda h: map_memory(h, 0, mmap.PAGESIZE, PRIVATE), "cannot be private"),
        (lambda h: h.device.newBufferWithLength_options_(0, SHARED), "no bytes"),
        (lambda h: h.device.newBufferWithLength_options_(4, 16), "Storage mode 1"),
    ],
)
def test_misuse_is_an_error(host: Host, misuse: Any, message: str) -> None:
    with pytest.raises(MetalMisuseError, match=message):
        misuse(host)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.setComputePipelineState_(None),
        lambda e: e.setBuffer_offset_atIndex_(None, 0, 0),
        lambda e: e.setBytes_length_atIndex_(b"1234", 4, 0),
        lambda e: e.setThreadgroupMemoryLength_atIndex_(16, 0),
        lambda e: e.dispatchThreadgroups_threadsPerThreadgroup_((1, 1, 1), (1, 1, 1)),
        lambda e: e.dispatchThreads_threadsPerThreadgroup_((1, 1, 1), (1, 1, 1)),
        lambda e: e.memoryBarrierWithScope_(1),
        lambda e: e.insertDebugSignpost_("here"),
        lambda e: e.pushDebugGroup_("here"),
        lambda e: e.popDebugGroup(),
        lambda e: e.endEncoding(),
    ],
)
def test_nothing_is_encoded_after_the_end(host: Host, call: Any) -> None:
    encoder = open_encoder(host)
    encoder.endEncoding()
    with pytest.raises(MetalMisuseError, match="after endEncoding"):
        call(encoder)


def test_an_encoder_s_other_methods(host: Host) -> None:
    """Those that the driver does without."""
    y = host.buffer(np.zeros(64))
    command_buffer = host.queue.commandBuffer()
    command_buffer.pushDebugGroup_("outer")
    kind = host.metal.MTLDispatchTypeConcurrent
    encoder = command_buffer.computeCommandEncoderWithDispatchType_(kind)
    assert encoder.dispatchType() == kind
    encoder.pushDebugGroup_("inner")
    encoder.insertDebugSignpost_("here")
    host.encode(encoder, y)
    encoder.memoryBarrierWithScope_(host.metal.MTLBarrierScopeBuffers)
    encoder.setBufferOffset_atIndex_(128, 0)
    size = host.metal.MTLSizeMake
    encoder.dispatchThreadgroups_threadsPerThreadgroup_(size(1, 1, 1), size(32, 1, 1))
    encoder.popDebugGroup()
    encoder.endEncoding()
    command_buffer.popDebugGroup()
    command_buffer.commit()
    command_buffer.waitUntilScheduled()
    command_buffer.waitUntilCompleted()
    assert (floats(y) == 1).all()


def test_pyobjc_s_own_complaints(host: Host) -> None:
    with pytest.raises(ValueError, match="Requesting buffer of 8, have buffer of 4"):
        open_encoder(host).setBytes_length_atIndex_(b"1234", 8, 0)
    values = host.metal.MTLFunctionConstantValues.alloc().init()
    with pytest.raises(ValueError, match="depythonifying 'pointer'"):
        values.setConstantValue_type_atIndex_(ctypes.c_uint(1), host.metal.MTLDataTypeUInt, 0)
    with pytest.raises(ValueError, match="Requesting buffer of 8, have buffer of 4"):
        host.device.newBufferWithBytes_length_options_(b"1234", 8, SHARED)
    with pytest.raises(TypeError):
        host.device.newBufferWithLength_options_(4)


# Compiling


def test_functions_and_their_constants(host: Host) -> None:
    assert sorted(host.library.functionNames()) == ["add", "overrun"]
    assert host.library.newFunctionWithName_("subtract") is None
    constants = host.library.newFunctionWithName_("add").functionConstantsDictionary().allValues()
    assert {(c.name(), c.index(), c.type(), c.required()) for c in constants} == {
        ("repeats", 0, host.metal.MTLDataTypeUInt, True),
        ("negative", 1, host.metal.MTLDataTypeBool, True),
    }
    unused = host.library.newFunctionWithName_("overrun").functionConstantsDictionary()
    assert unused.count() == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"'\w+' \(index \d\) has no value"),
        ({0: ("UInt", ctypes.c_uint(1))}, "'negative' .index 1. has no value"),
        (
            {0: ("Int", ctypes.c_int(1)), 1: ("Bool", ctypes.c_bool(1))},
            "'repeats' is uint, not int",
        ),
    ],
)
def test_constants_that_do_not_fit(host: Host, given: dict[int, Any], message: str) -> None:
    values = host.metal.MTLFunctionConstantValues.alloc().init()
    for index, (kind, content) in given.items():
        host.set(values, content, getattr(host.metal, f"MTLDataType{kind}"), index)
    function, error = host.library.newFunctionWithName_constantValues_error_("add", values, None)
    assert function is None
    assert re.search(message, error.localizedDescription())


def test_a_source_that_does_not_compile(host: Host) -> None:
    library, error = host.device.newLibraryWithSource_options_error_(
        SOURCE.replace("y[i] +=", "y[i] =+ z *"), None, None
    )
    assert library is None
    assert "'z'" in error.localizedDescription()
    assert error.domain() == host.metal.MTLLibraryErrorDomain
