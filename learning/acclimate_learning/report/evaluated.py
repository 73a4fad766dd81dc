"""The report of `acclimate evaluate`."""

from collections.abc import Iterator, Sequence
from typing import Final
from xml.etree.ElementTree import Element

import numpy as np

from acclimate_learning.asked import PORTFOLIO, RUNS, Asked
from acclimate_learning.evaluation import Evaluation, in_words
from acclimate_learning.judging import Judgement
from acclimate_learning.report.charts import Bar, Dots, bars, dots, lines
from acclimate_learning.report.page import Made, element, facts, folded, page, percent, points, section, table
from acclimate_store import Manifest
from acclimate_store.manifest import HARM, MOST_HARMED, Evidence

_HARM: Final = f"{100 * HARM:.0f} points"
_GOOD, _BAD = "good", "bad"
KINDS: Final = {
    "feature": "images change",
    "label": "classes change",
    "both": "both change",
    "none": "nothing changes",
    "own": "own clients",
}
"""Kinds of shift in words."""


def evaluated_page(found: Evaluation, content_hash: str, made: Made, published: str = "") -> str:
    """The HTML of an evaluation.

    Args:
        found: the evaluation.
        content_hash: of the model.
        made: when and by which command.
        published: the version that was published with what was found, and its default adapter; empty if none was.
    """
    about = {**identity(found.manifest, content_hash), "Clients": found.of}
    if published:
        about["Published"] = published
    title = f"Evaluation of {found.manifest.key}"
    if not found.judged:
        return page(title, made, facts(about), element("p", found.table()))
    parts = [_verdict(found), facts(about), _gains(found), _by_shift(found), _by_client(found)]
    if found.asked:
        parts.append(_labels(found))
    return page(title, made, *parts, _cost(found))


def identity(manifest: Manifest, content_hash: str) -> dict[str, str]:
    """Which model it is."""
    return {
        "Model": manifest.key,
        "Architecture": manifest.architecture,
        "Input": f"{manifest.input.channels} x {manifest.input.height} x {manifest.input.width}",
        "Classes": str(len(manifest.classes)),
        "Content hash": content_hash[:16],
    }


def gains_chart(evidence: Sequence[Evidence]) -> Element:
    """The gain of each adapter with its interval and whom it harms, the largest first."""
    ordered = sorted(evidence, key=lambda each: -each.gain)
    rows = [
        Bar(
            name=each.adapter,
            value=100 * each.gain,
            note=f"{points(each.gain)}, {percent(each.harmed, 0)} harmed",
            between=(100 * each.low, 100 * each.high),
            tone=_tone(each),
        )
        for each in ordered
    ]
    return bars("Gain over the frozen model in points, with its 95 % interval, by adapter", rows)


def gains_by_client(label: str, told: Sequence[tuple[str, Sequence[float]]]) -> Element:
    """Named rows of the gains of clients, of which those that were harmed have marks of their own."""
    rows = [
        Dots(name, [(100 * gain, int(gain < -HARM - 1e-9)) for gain in gains], 100 * float(np.mean(gains)))
        for name, gains in told
    ]
    return dots(label, rows, ("a client", "one that is harmed"), limit=-100 * HARM)


def _verdict(found: Evaluation) -> Element:
    """What to choose, and why."""
    chosen = found.recommended
    rule = (
        f"Recommended is the adapter with the largest gain among those whose 95 % interval is above 0 and that harm at "
        f"most {percent(MOST_HARMED, 0)} of the clients by more than {_HARM}."
    )
    if chosen is None:
        best = max(found.evidence, key=lambda each: each.gain)
        why = f"No adapter fits that. The largest gain is that of {best.adapter}: {best.obstacle}."
        said = element("p", "Recommended: ", element("strong", "none"), class_="verdict none")
        return element("div", said, element("p", f"{rule} {why}"))
    said = element("p", "Recommended: ", element("strong", chosen.adapter), f", {in_words(chosen)}.", class_="verdict")
    passed = [each.adapter for _, each in found.by_gain if each.gain > chosen.gain]
    more = f" {_listed(passed)} gained more on average and did not fit." if passed else ""
    few = " With fewer than about 30 clients the best of many looks better than it is: look at the intervals."
    return element("div", said, element("p", f"{rule}{more}{few if len(found.clients) < 30 else ''}"))


def _gains(found: Evaluation) -> Element:
    heading = ("Adapter", "Accuracy", "Gain", "95 % interval", "Worst client", "Harmed", "Why not")
    rows = [
        (
            each.adapter,
            percent(told.accuracy.mean(), 2),
            points(each.gain),
            f"{points(each.low)} to {points(each.high)}",
            points(each.worst),
            percent(each.harmed, 0),
            each.obstacle or "-",
        )
        for told, each in found.by_gain
    ]
    frozen = percent(found.judged[0].frozen.mean(), 2)
    chosen = next((number for number, (_, each) in enumerate(found.by_gain) if each is found.recommended), None)
    return section(
        "What each adapter gains",
        f"The frozen model has {frozen} of the images right, mean of {len(found.clients)} clients. A bar is how much "
        f"more an adapter has, in points; the thin line is the 95 % interval of the gain over clients like these. "
        f"Harmed are clients that lose more than {_HARM}.",
        gains_chart(found.evidence),
        table("Accuracy, gain and harm by adapter", heading, rows, chosen),
    )


def _by_shift(found: Evaluation) -> Element:
    """Accuracy for each kind of shift that clients have."""
    kinds = list(dict.fromkeys(client.kind for client in found.clients))
    members = [[row for row, client in enumerate(found.clients) if client.kind == kind] for kind in kinds]
    rows = [("frozen", found.judged[0].frozen), *((told.adapter, told.accuracy) for told, _ in found.by_gain)]
    means = [(name, [float(accuracy[rows].mean()) for rows in members]) for name, accuracy in rows]
    names = [f"{KINDS[kind]} ({len(rows)})" for kind, rows in zip(kinds, members, strict=True)]
    marks = [Dots(name, [(100 * value, kind) for kind, value in enumerate(values)]) for name, values in means]
    return section(
        "Accuracy by shift",
        "Mean accuracy of the clients of each kind, whose number stands in parentheses; the frozen model comes first.",
        dots("Accuracy in per cent by adapter and kind of shift", marks, names),
        table(
            "Accuracy by adapter and kind of shift",
            ("Adapter", *names),
            [(name, *(percent(value, 2) for value in values)) for name, values in means],
        ),
    )


def _by_client(found: Evaluation) -> Element:
    told = [(told.adapter, told.gains.tolist()) for told, _ in found.by_gain]
    heading = ("Client", "Shift", "Images", "Frozen", *(name for name, _ in told))
    frozen = found.judged[0].frozen
    rows = [
        (
            client.name,
            client.shift,
            str(len(client.labels)),
            percent(frozen[number]),
            *(points(g[number]) for _, g in told),
        )
        for number, client in enumerate(found.clients)
    ]
    return section(
        "Clients, one by one",
        f"A mark is one client: how many points it gains or loses with an adapter. The upright stroke is the mean; "
        f"left of the broken line clients lose more than {_HARM}.",
        gains_by_client("Gain of each client in points, by adapter", told),
        folded(f"All {len(rows)} clients in numbers", table("Gain of each client in points", heading, rows)),
    )


def _labels(found: Evaluation) -> Element:
    """Labels spent against harm."""
    best = found.recommended or max(found.evidence, key=lambda each: each.gain)
    shown = {PORTFOLIO: "portfolio", best.adapter: f"{best.adapter}, guarded"}
    curves = {
        name: [(100 * each.spent, 100 * each.harmed) for each in _of(found.asked, adapter)]
        for adapter, name in shown.items()
        if _of(found.asked, adapter)
    }
    oracle = found.oracle
    heading = ("Adapter", "Budget", "Spent", "Accuracy", "Gain", "Worst client", "Harmed")
    return section(
        "With the labels that the service asks for",
        f"The streams once more, answered by the service's own guard. It asks for labels of rows in which the answers "
        f"in play differ, within a budget, and is told all of them. portfolio chooses among its arms for each client; "
        f"the others are answered by the adapter unless labels speak against it. Means of {RUNS} runs; the worst "
        f"client is that of all runs.",
        lines(
            f"Clients that lose more than {_HARM}, in per cent, by share of rows labelled",
            "rows labelled, %",
            f"clients that lose more than {_HARM}, %",
            curves,
        ),
        f"The best adapter of each client, known only afterwards, would have {percent(oracle.mean(), 2)} right, "
        f"{points(float((oracle - found.judged[0].frozen).mean()))} points over frozen. The more adapters were judged "
        f"and the fewer images there are, the more of that is chance.",
        table(
            "Accuracy and harm by adapter and budget of labels",
            heading,
            [
                (
                    each.adapter,
                    percent(each.share),
                    percent(each.spent),
                    percent(each.accuracy.mean(), 2),
                    points(each.gain),
                    points(each.worst),
                    percent(each.harmed),
                )
                for each in found.asked
            ],
        ),
    )


def _cost(found: Evaluation) -> Element:
    """What a step takes."""
    told = [*(each for each, _ in found.by_gain), *_unjudged(found)]
    rows = [Bar(each.adapter, each.step_ms, f"{each.step_ms:.1f} ms") for each in told]
    heading = ("Adapter", "Step", "State", "Clients for which a step failed")
    return section(
        "What it costs",
        "The median time of a step with a batch here, where other programs may have run beside it, and the size of a "
        "client's state before it is stored.",
        bars("Time of a step in milliseconds, by adapter", rows),
        table(
            "Time of a step and size of a state by adapter",
            heading,
            [
                (each.adapter, f"{each.step_ms:.1f} ms", f"{each.state_bytes / 1e3:.1f} kB", str(each.failures))
                for each in told
            ],
        ),
    )


def _unjudged(found: Evaluation) -> Iterator[Judgement]:
    """The portfolio, where it was looked at for its labels only."""
    if found.portfolio is not None and found.portfolio not in found.judged:
        yield found.portfolio


def _of(asked: Sequence[Asked], adapter: str) -> list[Asked]:
    return [each for each in asked if each.adapter == adapter]


def _tone(each: Evidence) -> str:
    if not each.obstacle:
        return _GOOD
    return _BAD if each.high < 0 else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
