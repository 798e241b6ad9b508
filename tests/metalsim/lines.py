"""Source lines of compiled code, from the DWARF line tables of a shared library.

A simulated kernel's reports are addresses in its library. Tools that translate those come with some
compilers and not with others, so the tables (DWARF 4 and 5, in ELF) are read here. macOS keeps them
elsewhere; `atos`, which comes with its compiler, is asked there (never tried).
"""

import bisect
import platform
import struct
import subprocess
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

COMPRESSED = 0x800  # SHF_COMPRESSED
# Forms of DWARF 5 that an entry of a directory or file table may have: sizes in bytes.
FIXED_FORMS = {0x0B: 1, 0x05: 2, 0x06: 4, 0x07: 8, 0x1E: 16}  # data1, data2, data4, data8, data16
BLOCK, STRING, STRP, LINE_STRP, UDATA = 0x09, 0x08, 0x0E, 0x1F, 0x0F
PATH = 1  # DW_LNCT_path


class Row(NamedTuple):
    address: int
    file: str
    line: int


class Reader:
    """Reads little-endian numbers off a string of bytes."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self.data, self.position = data, position

    def number(self, size: int, signed: bool = False) -> int:
        self.position += size
        return int.from_bytes(
            self.data[self.position - size : self.position], "little", signed=signed
        )

    def leb(self, signed: bool = False) -> int:
        """A number in base 128, of any length."""
        value = shift = 0
        while True:
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value - (1 << shift) if signed and byte & 0x40 else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.position)
        found = self.data[self.position : end].decode("utf-8", "replace")
        self.position = end + 1
        return found


def sections(data: bytes) -> dict[str, bytes]:
    """Of a 64-bit ELF file, by name, uncompressed."""
    if data[:6] != b"\x7fELF\x02\x01":
        return {}
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [struct.unpack_from("<IIQQQQ", data, start + i * size) for i in range(count)]
    names = headers[names_index][4] if headers else 0
    found = {}
    for name, kind, flags, _, offset, length in headers:
        content = b"" if kind == 8 else data[offset : offset + length]  # 8: no bits
        if flags & COMPRESSED:
            content = zlib.decompress(content[24:])
        found[Reader(data, names + name).text()] = content
    return found


@dataclass
class LineTables:
    """All line tables of one library."""

    path: Path

    def place(self, address: int, base: int) -> str:
        """`file:line` of the instruction at an address, where the library is loaded at `base`; ""
        where nothing is known."""
        if platform.system() == "Darwin":
            return self._ask_atos(address, base)
        rows = self._rows
        found = bisect.bisect_right(rows, address - base, key=lambda row: row.address) - 1
        while found >= 0 and rows[found].line == 0:  # code of no line belongs to what it follows
            found -= 1
        return f"{Path(rows[found].file).name}:{rows[found].line}" if found >= 0 else ""

    def _ask_atos(self, address: int, base: int) -> str:
        command = ["atos", "-o", str(self.path), "-l", hex(base), hex(address)]
        answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        return answer.rpartition("(")[2].rstrip(")\n") if "(" in answer else ""

    @cached_property
    def _rows(self) -> list[Row]:
        found = sections(self.path.read_bytes())
        reader, rows = Reader(found.get(".debug_line", b"")), []
        while reader.position < len(reader.data):
            rows += Program(reader, found).rows()
        return sorted(rows)


class Program:
    """One line-number program: its header, and the rows that it describes."""

    def __init__(self, reader: Reader, found: dict[str, bytes]) -> None:
        self.reader, self.sections = reader, found
        length = reader.number(4)
        self.offset_size = 8 if length == 0xFFFFFFFF else 4
        if self.offset_size == 8:
            length = reader.number(8)
        self.end = reader.position + length
        self.version = reader.number(2)
        if self.version >= 5:
            reader.number(2)  # sizes of an address and of a segment's selector
        header_length = reader.number(self.offset_size)
        program = reader.position + header_length
        self.minimum_length = reader.number(1)
        reader.number(2)  # operations per instruction, is_stmt
        self.line_base = reader.number(1, signed=True)
        self.line_range = reader.number(1)
        self.opcode_base = reader.number(1)
        self.operands = [reader.number(1) for _ in range(self.opcode_base - 1)]
        self.files = self._files() if self.version >= 5 else self._old_files()
        reader.position = program

    def _old_files(self) -> list[str]:
        while self.reader.text():  # directories
            pass
        files = [""]  # counted from 1
        while name := self.reader.text():
            files.append(name)
            for _ in range(3):  # directory, time, length
                self.reader.leb()
        return files

    def _files(self) -> list[str]:
        self._entries()  # directories
        return self._entries()

    def _entries(self) -> list[str]:
        reader = self.reader
        formats = [(reader.leb(), reader.leb()) for _ in range(reader.number(1))]
        paths = []
        for _ in range(reader.leb()):
            for content, form in formats:
                value = self._value(form)
                if content == PATH:
                    paths.append(value)
        return paths

    def _value(self, form: int) -> str:
        """A string, or "" for what is none."""
        reader = self.reader
        if form == STRING:
            return reader.text()
        if form in (STRP, LINE_STRP):
            section = ".debug_line_str" if form == LINE_STRP else ".debug_str"
            return Reader(self.sections[section], reader.number(self.offset_size)).text()
        if form == UDATA:
            reader.leb()
        elif form == BLOCK:
            reader.position += reader.leb()
        elif form in FIXED_FORMS:
            reader.position += FIXED_FORMS[form]
        else:
            raise ValueError(f"DWARF form {form:#x} in a line table: lines.py does not know it.")
        return ""

    def rows(self) -> list[Row]:
        reader, rows = self.reader, []
        address, file, line = 0, 1, 1
        while reader.position < self.end:
            opcode = reader.number(1)
            if opcode >= self.opcode_base:  # advances both, and adds a row
                step = opcode - self.opcode_base
                address += step // self.line_range * self.minimum_length
                line += self.line_base + step % self.line_range
                rows.append(Row(address, self.files[file], line))
            elif opcode == 0:
                length = reader.leb()
                after = reader.position + length
                extended = reader.number(1)
                if extended == 1:  # end of a sequence: what follows has no line
                    rows.append(Row(address, "", 0))
                    address, file, line = 0, 1, 1
                elif extended == 2:
                    address = reader.number(length - 1)
                reader.position = after
            elif opcode == 1:
                rows.append(Row(address, self.files[file], line))
            elif opcode == 2:
                address += reader.leb() * self.minimum_length
            elif opcode == 3:
                line += reader.leb(signed=True)
            elif opcode == 4:
                file = reader.leb()
            elif opcode == 8:
                address += (255 - self.opcode_base) // self.line_range * self.minimum_length
            elif opcode == 9:
                address += reader.number(2)
            else:
                for _ in range(self.operands[opcode - 1]):
                    reader.leb()
        reader.position = self.end
        return rows
