"""Workers for tests: small scripts that speak bench/protocol.py."""

import textwrap
from pathlib import Path

BENCH = Path(__file__).parent.parent / "bench"


def write_worker(folder: Path, body: str) -> Path:
    """A worker that does what `body` says, whatever options it is given."""
    path = folder / "worker.py"
    head = f"""
        import sys
        sys.path.insert(0, {str(BENCH)!r})
        from protocol import parser, serve
        options = parser("").parse_known_args()[0]
        """
    path.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return path
