"""Deliberate faults in the sources of kernels."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`text`, which stands once in a file, becomes `replacement`. `examples` are the names of calls
    that are to show it."""

    fault: str
    file: str
    examples: tuple[str, ...]
    text: str
    replacement: str

    def of(self, source: str) -> str:
        """The file's source with the fault."""
        found = source.count(self.text)
        assert found == 1, (
            f"Mutant '{self.fault}' replaces a text that {self.file} has {found} times, not once: "
            f"{self.text!r}. The kernel has changed; quote what stands there now."
        )
        return source.replace(self.text, self.replacement)


def mutants(file: str, examples: str, *entries: tuple[str, str, str]) -> Iterator[Mutant]:
    """One for each entry: what is wrong, the text, its replacement."""
    for fault, text, replacement in entries:
        yield Mutant(fault, file, tuple(examples.split(", ")), text, replacement)
