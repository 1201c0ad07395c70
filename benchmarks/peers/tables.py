"""The tables as Markdown, from what was measured."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks.peers.measure import (
    CHECKPOINT_RANKS,
    EPOCHS,
    FRACTIONS,
    GLOBAL_BATCH,
    RESTORED_RANKS,
    SAVED_RANKS,
    WORKERS,
    is_problem,
)

Answer = dict[str, Any]
Row = list[str]

OURS = "ours"
LIMIT = "limit"
_MESSAGE = 110  # characters of an error in a cell


def markdown(table: str, measured: Answer, titles: dict[str, str]) -> str:
    """One table with its heading.

    Args:
        measured: What ``measure.TABLES[table]`` gave.
        titles: Of the peers.
    """
    heading, header, rows_of = _TABLES[table]
    rows = []
    for name, found in measured.items():
        title = titles.get(name, name)
        if is_problem(found):
            rows.append([title, problem(found), *[""] * (len(header) - 2)])
        else:
            rows += [[title, *row] for row in rows_of(name, found, measured)]
    lines = [f"### {table}. {heading}", "", _line(header), _line(["---"] * len(header)), *map(_line, rows)]
    return "\n".join(lines) + "\n"


def problem(answer: Answer) -> str:
    if "install" in answer:
        return f"does not install: {_cut(answer['install'])}"
    return f"none: {answer['unsupported']}" if "unsupported" in answer else f"fails: {_cut(answer['error'])}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cut(message: str) -> str:
    return message if len(message) <= _MESSAGE else message[: _MESSAGE - 1] + "…"


def spread(values: Sequence[float], shown: Callable[[float], str] = lambda value: f"{value:.3g}") -> str:
    """The median with the smallest and largest."""
    low, high = shown(min(values)), shown(max(values))
    return shown(median(values)) + ("" if low == high else f" ({low}–{high})")


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(one, other, strict=False)]


def _values(answers: Sequence[Answer], value: Callable[[Answer], float]) -> list[float] | None:
    return None if not answers or any(map(is_problem, answers)) else [value(answer) for answer in answers]


def _best(found: Answer, value: Callable[[Answer], float]) -> tuple[str, list[float], list[str]]:
    """The setting with the largest median, its values, and what the others gave in words.

    Returns:
        Without values, in place of the others their problems, if no setting has any.
    """
    values = {key: _values(answers, value) for key, answers in found.items()}
    problems = [f"{key}: {problem(answers[-1])}" for key, answers in found.items() if values[key] is None]
    able = {key: numbers for key, numbers in values.items() if numbers is not None}
    if not able:
        return "", [], problems
    best = max(able, key=lambda key: median(able[key]))
    others = [f"{key} {median(numbers):.3g}" for key, numbers in able.items() if key != best]
    return best, able[best], others + problems


def _speed(answer: Answer) -> float:
    return answer["tokens"] / answer["seconds"] / 1e6


def _times(measured: Answer, name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    return "" if name in (OURS, LIMIT) or not ours or not theirs else spread(_ratios(ours, theirs)) + "×"


def _rows_a(name: str, found: Answer, measured: Answer) -> list[Row]:
    best, speeds, others = _best(found, _speed)
    if not speeds:
        return [[others[0], "", "", "", ""]]
    limit = _values(measured.get(LIMIT, {}).get("our store", []), _speed) or []
    ours = _best(measured.get(OURS, {}), _speed)[1]
    share = spread(_ratios(speeds, limit)) if limit else ""
    return [[best, spread(speeds), share, _times(measured, name, ours, speeds), "; ".join(others)]]


def _rows_b(name: str, found: Answer, measured: Answer) -> list[Row]:
    best, speeds, others = _best(found, _speed)
    if not speeds:
        return [[others[0], "", "", "", ""]]
    first = [answer["first"] for answer in found[best]]
    ours = _best(measured.get(OURS, {}), _speed)[1]
    return [[best, spread(first), spread(speeds), _times(measured, name, ours, speeds), "; ".join(others)]]


def _rows_c(name: str, found: Answer, measured: Answer) -> list[Row]:
    cells = []
    for cores, answers in found.items():
        seconds = _values(answers, lambda answer: answer["seconds"])
        ours = _values(measured.get(OURS, {}).get(cores, []), lambda answer: answer["seconds"]) or []
        if seconds is None:
            cells += [problem(answers[-1]), ""]
        else:
            times = "" if name == OURS or not ours else spread(_ratios(seconds, ours)) + "×"
            cells += [spread(seconds), times]
    sizes = [answer["bytes"] for answers in found.values() for answer in answers if "bytes" in answer]
    cells += [""] * (4 - len(cells))
    return [[*cells[:4], f"{median(sizes) / 1e6:,.1f}" if sizes else ""]]


def _rows_d(name: str, found: Answer, measured: Answer) -> list[Row]:
    rows = []
    for setting in dict.fromkeys(key.split("|")[0] for key in found):
        cells: Row = [setting]
        same = []
        for fraction in FRACTIONS:
            answers = found[f"{setting}|{fraction}"]
            seconds = _values(answers, lambda answer: answer["seconds"])
            cells.append(problem(answers[-1]) if seconds is None else spread(seconds))
            if fraction and seconds is not None:
                same += [answer["same"] for answer in answers]
        rows.append([*cells, "" if not same else "the same" if all(same) else "OTHERS"])
    return rows


def _rows_e(name: str, found: Answer, measured: Answer) -> list[Row]:
    def cell(answer: Answer) -> str:
        return problem(answer) if is_problem(answer) else f"{answer['bytes']:,}"

    return [[setting, *[cell(answers[str(ranks)]) for ranks in CHECKPOINT_RANKS]] for setting, answers in found.items()]


def _rows_f(name: str, found: Answer, measured: Answer) -> list[Row]:
    cells = []
    for workers in WORKERS:
        answers = found[str(workers)]
        if any(map(is_problem, answers)):
            cells += [problem(answers[-1]), ""]
        else:
            for kind in ("own", "total"):
                cells.append(spread([(a["peak"][kind] - a["before"][kind]) / 1e6 for a in answers], "{:,.0f}".format))
    return [cells]


def _rows_g(name: str, found: Answer, measured: Answer) -> list[Row]:
    def cell(answer: Answer) -> str:
        if is_problem(answer):
            return problem(answer)
        return " / ".join(_share(answer[key], answer["tokens"]) for key in ("missing", "repeated", "never_labels"))

    return [
        [setting, *[cell(answers[f"{ranks}|{workers}"]) for ranks, workers in EPOCHS]]
        for setting, answers in found.items()
    ]


def _share(part: int, whole: int) -> str:
    return "0" if not part else f"{part:,} ({100 * part / whole:.2g} %)"


def _rows_h(name: str, found: Answer, measured: Answer) -> list[Row]:
    rows = []
    for setting, answers in found.items():
        reference = answers["reference"]
        if is_problem(reference):
            rows.append([setting, problem(reference), *[""] * (len(RESTORED_RANKS) - 1)])
            continue
        cells = [_verdict(answers[str(ranks)]) for ranks in RESTORED_RANKS]
        note = "" if reference["repeatable"] else " (two runs from the start differ)"
        rows.append([setting + note, *cells])
    return rows


def _verdict(answer: Answer) -> str:
    if is_problem(answer):
        return problem(answer)
    if answer["verdict"] == "silently wrong":
        return f"**wrong**: {_percent(answer['missing'])} missing, {_percent(answer['repeated'])} twice"
    if answer["verdict"] == "other batches" and answer["same_steps"]:
        return f"identical for {answer['same_steps']} of {answer['steps']} steps, then other batches"
    return answer["verdict"]


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def refusals(measured: Answer, titles: dict[str, str]) -> str:
    """What was said by those that refused, once each."""
    said = {
        f"- {titles.get(name, name)} ({setting}) at {ranks} ranks: `{answer['why']}`"
        for name, found in measured.items()
        if not is_problem(found)
        for setting, answers in found.items()
        for ranks, answer in _first_refusals(answers)
    }
    return "\n".join(sorted(said))


def _first_refusals(answers: Answer) -> list[tuple[str, Answer]]:
    first: dict[str, tuple[str, Answer]] = {}
    for ranks, answer in answers.items():
        if answer.get("verdict") == "refused":
            first.setdefault("".join(c for c in answer["why"] if not c.isdigit()), (ranks, answer))
    return list(first.values())


def _several(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


_THIS = "this repository is"
_TABLES: dict[str, tuple[str, Row, Callable[[str, Answer, Answer], list[Row]]]] = {
    "a": (
        "Delivering tokens, 8 × 2,048 a batch as int64, one process",
        ["loader", "setting", "M tokens/s", "of the limit", f"{_THIS} … as fast", "other settings, M tokens/s"],
        _rows_a,
    ),
    "b": (
        "Text to batches: one epoch from JSON lines, tokenizing included",
        [
            *("loader", "setting", "first batch after, s", "M tokens/s over the epoch", f"{_THIS} … as fast"),
            "other settings, M tokens/s",
        ],
        _rows_b,
    ),
    "c": (
        "Text to the loader's own format",
        ["loader", "1 core, s", f"{_THIS} … as fast", "all cores, s", f"{_THIS} … as fast", "MB written"],
        _rows_c,
    ),
    "d": (
        "From opening to the first batch, s: at the start, and restored in mid-epoch",
        ["loader", "setting", *[f"{fraction:.0%}" for fraction in FRACTIONS], "next batches"],
        _rows_d,
    ),
    "e": (
        "Bytes of the data's part of a checkpoint",
        ["loader", "setting", *[_several(ranks, "rank") for ranks in CHECKPOINT_RANKS]],
        _rows_e,
    ),
    "f": (
        "Peak memory above the imports, MB: own and shared, and with mapped files",
        [
            "loader",
            *[f"{workers} workers, {kind}" for workers in WORKERS for kind in ("own", "with files")],
        ],
        _rows_f,
    ),
    "g": (
        "Tokens of one epoch: missing / repeated / an input but never a label",
        ["loader", "setting", *[f"{_several(one, 'rank')}, {_several(other, 'worker')}" for one, other in EPOCHS]],
        _rows_g,
    ),
    "h": (
        f"Saved at {SAVED_RANKS} ranks with a global batch of {GLOBAL_BATCH} rows, restored at",
        ["loader", "setting", *map(str, RESTORED_RANKS)],
        _rows_h,
    ),
}
