"""What NVRTC's code says of a kernel: enough to know, without a GPU, that a launch fits it.

A cubin is an ELF file. Section .nv.info of a kernel is a list of attributes (format, number, size
or value, content), whose numbers `cuobjdump -elf` names:

    EIATTR_KPARAM_INFO  0x17  index, u16 position, u16 offset; bits 18 to 31 of the last word: bytes
    EIATTR_MAX_THREADS  0x05  threads that __launch_bounds__ allows, by axis
    EIATTR_REGCOUNT     0x2f  in .nv.info: symbol, registers of a thread
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

PARAMETER, MOST_THREADS, REGISTERS = 0x17, 0x05, 0x2F
WITH_CONTENT = 4  # the format of an attribute whose content follows
NO_BITS = 8  # the type of a section of which there is only a size
# Shared memory of a block that is the driver's, beside what a kernel may have. It lies in front.
DRIVERS_SHARED = 1024


@dataclass(frozen=True)
class Shape:
    """Bytes of each parameter; registers of a thread; threads at most, if the source says so; bytes
    of shared memory that the kernel declares itself."""

    parameters: tuple[int, ...]
    registers: int
    most_threads: int | None
    shared: int


def shape(image: bytes, entry: str) -> Shape:
    """Of the kernel with the mangled name `entry`."""
    sections = dict(_sections(image))
    parameters: dict[int, int] = {}
    most_threads = None
    for attribute, content in _attributes(sections[f".nv.info.{entry}"][1]):
        if attribute == PARAMETER:
            _, position, _, word = struct.unpack("<IHHI", content)
            parameters[position] = word >> 18
        elif attribute == MOST_THREADS:
            x, y, z = struct.unpack("<3I", content)
            most_threads = x * y * z
    registers = {
        _symbol(sections, symbol): number
        for attribute, content in _attributes(sections[".nv.info"][1])
        if attribute == REGISTERS
        for symbol, number in struct.iter_unpack("<2I", content)
    }
    shared = sections.get(f".nv.shared.{entry}", (0, b""))[0]
    if shared and ".nv.shared.reserved.0" in sections:  # from Hopper on
        shared -= DRIVERS_SHARED
    sizes = tuple(parameters[i] for i in range(len(parameters)))
    return Shape(sizes, registers[entry], most_threads, shared)


def _symbol(sections: dict[str, tuple[int, bytes]], index: int) -> str:
    """The name of a symbol."""
    (start,) = struct.unpack_from("<I", sections[".symtab"][1], 24 * index)
    names = sections[".strtab"][1]
    return names[start : names.index(b"\0", start)].decode()


def _sections(image: bytes) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """Name, size and content of each section."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names_index = struct.unpack_from("<3H", image, 0x3A)
    headers = [struct.unpack_from("<2I4Q2I2Q", image, start + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, nbytes, *_ in headers:
        end = image.index(b"\0", names + name)
        content = b"" if kind == NO_BITS else image[offset : offset + nbytes]
        yield image[names + name : end].decode(), (nbytes, content)


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == WITH_CONTENT:
            yield attribute, info[place : place + size]
            place += size
