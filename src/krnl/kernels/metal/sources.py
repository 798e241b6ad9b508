"""Kernel sources as Metal's run-time compiler wants them: one text, as it knows no include path."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'\s*#\s*include\s*"([^"]+)"')
_ONCE = re.compile(r"\s*#\s*pragma\s+once\b")


def libraries() -> list[str]:
    """The names by which `source` knows them."""
    return sorted(path.stem for path in FOLDER.glob("*.metal"))


def source(library: str, folder: Path = FOLDER) -> str:
    """The text of `library`.metal with the headers beside it put in place, once each. `#line` marks
    let the compiler's messages name the file that a line comes from."""
    return "\n".join(_lines(folder / f"{library}.metal", set())) + "\n"


def _lines(path: Path, seen: set[Path]) -> list[str]:
    seen.add(path)
    result = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            result.append("" if _ONCE.match(line) else line)
        elif (header := path.parent / include[1]) in seen:
            result.append("")
        else:
            result += [*_lines(header, seen), f'#line {number + 1} "{path.name}"']
    return result
