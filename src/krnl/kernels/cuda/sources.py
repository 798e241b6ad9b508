"""Kernel sources as NVRTC wants them: a text, and the headers that it may include by name."""

from pathlib import Path

FOLDER = Path(__file__).parent


def libraries() -> list[str]:
    """The names by which `source` knows them."""
    return sorted(path.stem for path in FOLDER.glob("*.cu"))


def source(library: str) -> str:
    """The text of `library`.cu."""
    return (FOLDER / f"{library}.cu").read_text("utf-8")


def headers() -> dict[str, str]:
    """Name and text of everything that a source may include."""
    return {path.name: path.read_text("utf-8") for path in sorted(FOLDER.glob("*.h"))}
