"""Writes docs/measurements.md from the results in docs/results/.

A result is what `krnl bench TABLE --json` wrote, or a comparison with other tools: title, machine,
day, how quiet it was, and `cases`, each a list of `tools` with median, low and high, of which the
first is KRNL. Such a list may also be what `bench/peers/run.py --json` wrote. To add a figure, put
its file there and run

    python scripts/write_measurements.py
"""

import argparse
import json
import statistics
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

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
    """The whole page."""
    contents = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    parts = ["# Measurements", wrapped(ABOUT)]
    missing: list[str] = []
    for content in contents:
        if content.get("kind") == "not measured":
            missing += content["lines"]
        elif content.get("kind") == "peers":
            parts += peers(content)
        else:
            parts += table(content)
            missing += absent(content)
    parts += ["## Not measured", "\n".join(wrapped(f"- {line}", "  ") for line in missing)]
    return "\n\n".join(parts) + "\n"


def peers(content: dict[str, Any]) -> Iterator[str]:
    """A comparison with other tools."""
    yield f"## {content['title']}"
    command = f"; `{content['command']}`" if content["command"] else ""
    yield circumstances(content["when"], content["machine"], content["quiet"] + command)
    if content["about"]:
        yield wrapped(content["about"])
    cases = [(case["name"], [summary(t) for t in case["tools"]]) for case in content["cases"]]
    if cases:
        yield comparison(cases, content["unit"], content["digits"])
    yield from map(wrapped, content["notes"])


def summary(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool's figures, taken together if they are steps."""
    if "steps" not in tool:
        return tool
    seconds = [step["seconds"] for step in tool["steps"]]
    return {
        **tool,
        "name": tool["tool"],
        "median": statistics.median(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "peak_mib": max(step["peak"] for step in tool["steps"]) / 2**20,
    }


def comparison(cases: Sequence[tuple[str, list[dict[str, Any]]]], unit: str, digits: int) -> str:
    """A line for each tool; columns that no tool fills are left out. A tool measured in another run
    carries KRNL's figure of that run as `krnl`; one whose seconds were stored rounded, its `ratio`
    from before."""
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
    filled = [i for i in range(len(heads)) if i == 0 or any(row[i] for row in rows)]
    return grid([heads[i] for i in filled], [[row[i] for i in filled] for row in rows])


def memory(tool: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    if "peak_mib" not in tool:
        return ["", ""]
    share = "" if tool is ours else f"{ours['peak_mib'] / tool['peak_mib']:.2f}x"
    return [f"{tool['peak_mib']:,.0f}", share]


def table(content: dict[str, Any]) -> Iterator[str]:
    """A result of `krnl bench`. One that was forced is not worth publishing."""
    if not all(entry["trusted"] for entry in content["entries"]):
        sys.exit(f"The stored result of krnl bench {content['command']} is untrusted; remove it.")
    machine, measurement = content["machine"], content["measurement"]
    yield f"## {content['title']} (`krnl bench {content['command']}`)"
    where = ", ".join(
        [machine["device"], machine["system"]]
        + [f"driver {machine['driver']}"] * bool(machine["driver"])
        + [f"krnl {machine['krnl']}"]
    )
    if measurement is None:
        yield wrapped(f"{where}. None of it can be measured there.")
        return
    yield circumstances(measurement["when"], where, quiet(measurement))
    rows = [
        [
            entry["name"],
            f"{figure(entry['value'])} {entry['unit']}",
            " – ".join(map(figure, entry["spread"] or ())),
            "" if entry["reported"] is None else figure(entry["reported"]),
            "" if entry["ratio"] is None else f"{entry['ratio']:.2f}x",
            entry["note"],
        ]
        for entry in content["entries"]
        if entry["value"] is not None
    ]
    yield grid(["", "measured", "quartiles", "the report, M1 Pro", "ratio", ""], rows)


def absent(content: dict[str, Any]) -> Iterator[str]:
    """What a table could not measure on its machine."""
    for entry in content["entries"]:
        if entry["value"] is None:
            device = content["machine"]["device"]
            yield f"`krnl bench {content['command']}`, {entry['name']} ({device}): {entry['note']}"


def quiet(measurement: dict[str, Any]) -> str:
    rates = [control["rate"] / 1e9 for control in measurement["controls"]]
    condition = measurement["condition"]
    load = "" if condition["load"] is None else f", load {condition['load']:.2f}"
    return (
        f"{len(rates)} controls of {min(rates):,.0f} to {max(rates):,.0f} GFLOP/s, of which "
        f"{measurement['reference'] / 1e9:,.0f} are reached in quiet; other processes took "
        f"{condition['others']:.0%} of one core{load}"
    )


def circumstances(when: str, machine: str, how_quiet: str) -> str:
    return wrapped(f"*{when[:10]}; {machine}. Quiet: {how_quiet}.*")


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def figure(value: float) -> str:
    """About four digits."""
    for least, digits in ((100, 0), (10, 1), (1, 2)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.3f}"


def wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    main()
