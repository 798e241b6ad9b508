#!/usr/bin/env python3
"""Writes tests/metalsim/metal_names.json: what PyObjC's module `Metal` has for compute.

    python scripts/read_metal_names.py WHEEL HEADERS

WHEEL is the macOS wheel of pyobjc-framework-Metal, which any machine can download:

    pip download --only-binary=:all: --platform macosx_11_0_arm64 --python-version 3.11 --no-deps \\
        pyobjc-framework-Metal

It holds constants, functions, and what PyObjC must be told of pointers. It does not hold every
selector: PyObjC asks the Objective-C runtime of a Mac for those. HEADERS is what PyObjC's authors
read from Apple's headers, pyobjc-framework-Metal/metadata/raw/arm64-*.fwinfo in their repository;
it has every class, protocol and selector, and the version of macOS that each came with.
"""

import json
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

TARGET = Path(__file__).parent.parent / "tests" / "metalsim" / "metal_names.json"
CLASSES = (
    "MTLDevice", "MTLArchitecture", "MTLAllocation", "MTLResource", "MTLBuffer",
    "MTLCompileOptions", "MTLLibrary", "MTLFunction", "MTLFunctionConstant",
    "MTLFunctionConstantValues",
    "MTLComputePipelineDescriptor", "MTLComputePipelineState", "MTLCommandQueue",
    "MTLCommandBuffer", "MTLCommandBufferDescriptor", "MTLCommandBufferEncoderInfo",
    "MTLCommandEncoder", "MTLComputeCommandEncoder",
)  # fmt: skip
CONSTANTS = re.compile(
    "MTL(BarrierScope|CPUCacheMode|CommandBuffer|CommandEncoder|DataType|DispatchType|GPUFamily|"
    "HazardTracking|LanguageVersion|Library|Math|PipelineOption|PurgeableState|Resource|StorageMode)"
)
FUNCTIONS = ("MTLCreateSystemDefaultDevice", "MTLCopyAllDevices", "MTLSizeMake")


def read_wheel(path: Path) -> dict[str, Any]:
    """Constants, functions, and the selectors with pointers among their arguments."""
    told: dict[str, dict[str, Any]] = {}
    objc = ModuleType("objc")
    objc.__dict__.update(
        arch="arm64",
        _updatingMetadata=lambda on: None,
        registerMetaDataForSelector=lambda cls, name, meta: told.update({name.decode(): meta}),
        __getattr__=lambda name: lambda *given, **named: None,
    )
    sys.modules["objc"] = objc
    module: dict[str, Any] = {}
    with zipfile.ZipFile(path) as wheel:
        exec(wheel.read("Metal/_metadata.py"), module)
    pairs = [entry.split("@") for entry in module["enums"].strip("$").split("$")]
    constants = {name: int(value) for name, value in pairs if CONSTANTS.match(name)}
    strings = [s.split("@")[0] for s in module["constants"].strip("$").split("$")]
    returned, buffers = [], []
    for selector, metadata in told.items():
        arguments = metadata.get("arguments", {}).values()
        if any(a.get("type_modifier") == b"o" for a in arguments):
            returned.append(selector)
        if any("c_array_length_in_arg" in a for a in arguments):
            buffers.append(selector)
    return {
        "wheel": path.name,
        "constants": dict(sorted(constants.items())),
        "strings": sorted(name for name in strings if CONSTANTS.match(name)),
        "functions": [name for name in FUNCTIONS if name in module["functions"]],
        "returns arguments": sorted(returned),
        "takes a Python buffer": sorted(buffers),
    }


def read_headers(path: Path) -> dict[str, Any]:
    """Of each class or protocol: its parents, and its selectors with the macOS they came with."""
    text = path.read_text("utf-8")
    headers = json.loads(text[text.index("{") :])
    definitions = headers["definitions"]
    classes = {}
    for name in CLASSES:
        protocol = definitions["formal_protocols"].get(name)
        found = protocol or definitions["classes"][name]
        parents = found["implements"] if protocol else [*found["protocols"], found["super"]]
        classes[name] = {
            "parents": [parent for parent in parents if parent.startswith("MTL")],
            "selectors": {
                method["selector"]: method.get("introduced", "")
                for method in sorted(found["methods"], key=lambda method: method["selector"])
            },
        }
    return {"headers": f"macOS {headers['release']}", "classes": classes}


def main() -> None:
    wheel, headers = map(Path, sys.argv[1:])
    names = read_wheel(wheel) | read_headers(headers)
    known = {selector for c in names["classes"].values() for selector in c["selectors"]}
    for kind in ("returns arguments", "takes a Python buffer"):
        names[kind] = [selector for selector in names[kind] if selector in known]
    TARGET.write_text(json.dumps(names, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
