"""Writes docs/measurements.md from the results in docs/results/.

A result is what `krnl bench TABLE --json` wrote, or a comparison with other tools: title, machine,
day, how quiet it was, and `cases`, each a list of `tools` with median, low and high, of which the
first is KRNL; or a list of what was not measured. To measure a table anew, or for the first time:

    krnl bench gemm --json docs/results/bench-gemm-cpu.json
    python scripts/write_measurements.py

A file is called bench-TABLE-DEVICE.json. What else tells it from others of its table stands behind
the device: bench-step-cuda-4096.json, bench-model-cuda-llama-3.2-1b-4x2048.json. Results stand on
the page as krnl bench lists their tables, and those of one table by the names of their files. What
a reader must know besides, add to the file as "remark".
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from krnl.bench.command import LEAST_ROUNDS, TABLES
from krnl.bench.results import HEADS, SCHEMA, cells, controls, from_json, told

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "measurements.md"
RESULTS = DOCS / "results"
WIDTH = 120

ABOUT = """Written by `scripts/write_measurements.py` from `docs/results/`; change those, not this
page. What is compared is from one run on one machine unless a line says otherwise, the tools
interleaved, medians with the range or the quartiles beside them. Under each title: which machine,
when, and how quiet it was."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args()
    text = page(RESULTS)
    if not options.check:
        PAGE.write_text(text, "utf-8")
    elif PAGE.read_text("utf-8") != text:
        sys.exit(f"{PAGE} is not what its results say: run python scripts/write_measurements.py.")


def page(folder: Path) -> str:
    """The whole page. Ends with a sentence at a file that is no result, or is not worth
    publishing."""
    parts = ["# Measurements", wrapped(ABOUT)]
    missing: list[str] = []
    results: list[tuple[Path, dict[str, Any]]] = []
    for path in sorted(folder.glob("*.json")):
        with named(path):
            content = json.loads(path.read_text("utf-8"))
            match content:
                case {"kind": "not measured"}:
                    missing += [wrapped(f"- {line}", "  ") for line in content["lines"]]
                case {"kind": "peers"}:
                    parts += peers(content)
                case {"schema": int(), "command": str(), "entries": list()}:
                    check(content, path)
                    results.append((path, content))
                case _:
                    sys.exit(
                        f"{path} is neither a result of krnl bench, nor a comparison with other "
                        "tools, nor a list of what was not measured; remove it."
                    )
    for path, content in in_order(results):
        with named(path):
            parts += table(content)
            missing += absent(content)
    parts += ["## Not measured", "\n".join(missing)]
    return "\n\n".join(parts) + "\n"


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Ends with a sentence where a file is not what it should be."""
    try:
        yield
    except ValueError as error:
        sys.exit(f"{path} is not valid JSON: {error}.")
    except KeyError as error:
        sys.exit(f"{path} is damaged: it lacks {error}. Remove it, or measure it anew.")
    except TypeError as error:
        sys.exit(f"{path} is damaged: {error}. Remove it, or measure it anew.")


def in_order(results: Sequence[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, dict[str, Any]]]:
    """As `krnl bench` lists its tables, and by file where they are of one. Ends with a sentence
    where two files hold the same title and device: the old one is to be replaced."""
    seen: dict[tuple[str, str, str], Path] = {}
    for path, content in results:
        with named(path):
            what = content["command"], content["title"], content["machine"]["device"]
        if (other := seen.setdefault(what, path)) != path:
            sys.exit(f"{other} and {path} both hold krnl bench {what[0]} on {what[2]}; keep one.")
    tables = list(TABLES)
    return sorted(results, key=lambda result: tables.index(result[1]["command"]))


def peers(content: dict[str, Any]) -> Iterator[str]:
    """A comparison with other tools."""
    yield f"## {content['title']}"
    command = f"; `{content['command']}`" if content["command"] else ""
    yield circumstances(content["when"], content["machine"], content["quiet"] + command)
    if content["about"]:
        yield wrapped(content["about"])
    cases = [(case["name"], case["tools"]) for case in content["cases"]]
    if cases:
        yield comparison(cases, content["unit"], content["digits"])
    yield from map(wrapped, content["notes"])


def comparison(cases: Sequence[tuple[str, list[dict[str, Any]]]], unit: str, digits: int) -> str:
    """A line for each tool. One that was measured in another run carries KRNL's figure of that run
    as `krnl`; one whose seconds were stored rounded, its `ratio` from before."""
    rows = []
    for name, tools in cases:
        ours, *_ = tools
        for tool in tools:
            beside = tool.get("krnl", ours["median"])
            remarks = [f"another run, {ours['name']} {beside:.{digits}f}"] if "krnl" in tool else []
            remarks += [tool["note"]] if "note" in tool else []
            label = tool["name"] + (f" ({'; '.join(remarks)})" if remarks else "")
            row = [f"**{name}**: {label}" if name and tool is ours else label]
            row += [f"{tool['median']:.{digits}f}"]
            row += [f"{tool['low']:.{digits}f} – {tool['high']:.{digits}f}"]
            row += ["" if tool is ours else f"{tool.get('ratio', tool['median'] / beside):.2f}x"]
            row += memory(tool, ours)
            row += [f"{tool['first']:.1f} s" if "first" in tool else ""]
            row += [f"{tool['of_peak']:.0%}" if "of_peak" in tool else ""]
            rows.append(row)
    heads = ["", unit, "range", "KRNL is", "MiB", "KRNL uses", "first step", "of the peak"]
    return grid(heads, rows)


def memory(tool: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    if "peak_mib" not in tool:
        return ["", ""]
    share = "" if tool is ours else f"{ours['peak_mib'] / tool['peak_mib']:.2f}x"
    return [f"{tool['peak_mib']:,.0f}", share]


def check(content: dict[str, Any], path: Path) -> None:
    """Ends with a sentence if a result of `krnl bench` is not worth publishing: of another schema,
    forced, of small sizes or too few rounds, or without something that belongs to it, unless the
    sentence `converted` says what it lacks."""
    name = f"{path}, of krnl bench {content['command']},"
    if content["schema"] != SCHEMA:
        sys.exit(f"{path} is of schema {content['schema']}, not {SCHEMA}; measure it anew.")
    if not all(entry["trusted"] for entry in content["entries"]):
        sys.exit(f"{name} is untrusted; remove it.")
    if content["quick"]:
        sys.exit(f"{name} is of small sizes; remove it.")
    measurement = content["measurement"] or {"references": {}}
    for place, values in {"machine": content["machine"], **measurement["references"]}.items():
        for key, value in values.items():
            if value is None and "converted" not in content:
                sys.exit(f"{name} does not say {key} of {place}; measure it anew.")
    if content["rounds"] < LEAST_ROUNDS:
        sys.exit(f"{name} is of {content['rounds']} rounds; measure {LEAST_ROUNDS} or more.")


def table(content: dict[str, Any]) -> Iterator[str]:
    """A result of `krnl bench`."""
    result = from_json(_known(content))
    machine, measurement = result.machine, result.measurement
    yield f"## {result.title}, on {machine.device}"
    driver = [f"driver {machine.driver}"] * bool(machine.driver)
    ours = ", ".join([machine.device, machine.system, *driver, f"krnl {machine.krnl}"])
    if measurement is None:
        yield wrapped(f"`{result.asked}`; {ours}. None of it can be measured there.")
        return
    where = "; ".join([ours, *map(told, result.tools), f"medians of {result.rounds} rounds"])
    quiet = "; ".join([*controls(measurement), measurement.condition.describe()])
    yield circumstances(measurement.when, f"`{result.asked}`; {where}", quiet)
    for key in ("converted", "remark"):
        if key in content:
            yield wrapped(content[key])
    rows = [cells(entry, result.trusted) for entry in result.entries if entry.value is not None]
    yield grid(HEADS, rows)


def _known(content: dict[str, Any]) -> dict[str, Any]:
    """With words for the days that a converted result does not know."""
    if content["measurement"] is None:
        return content
    references = {
        device: {**reference, "learnt": reference["learnt"] or "on an unknown day"}
        for device, reference in content["measurement"]["references"].items()
    }
    return {**content, "measurement": {**content["measurement"], "references": references}}


def absent(content: dict[str, Any]) -> Iterator[str]:
    """What a table could not measure on its machine: a line, and one below it for each entry."""
    missing = [entry for entry in content["entries"] if entry["value"] is None]
    if missing:
        result = from_json(_known(content))
        yield wrapped(f"- `{result.asked}` on {result.machine.device}:", "  ")
    for entry in missing:
        yield wrapped(f"  - {entry['name']}: {entry['note']}", "    ")


def circumstances(when: str, machine: str, how_quiet: str) -> str:
    return wrapped(f"*{when[:10]}; {machine}. Quiet: {how_quiet}.*")


def grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; columns that no row fills are left out."""
    filled = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in rows)]
    lines = [[line[i] for i in filled] for line in (heads, ["---"] * len(heads), *rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    main()
