"""The report of `acclimate learn`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from acclimate_learning.clients import Client, Role
from acclimate_learning.evaluation import in_words
from acclimate_learning.judging import Judgement
from acclimate_learning.rates import Learned
from acclimate_learning.report.charts import Bar, bars, lines
from acclimate_learning.report.evaluated import KINDS, gains_by_client, identity
from acclimate_learning.report.page import Made, element, facts, folded, page, percent, points, section, table
from acclimate_store import Manifest
from acclimate_store.manifest import Evidence


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What was learned, and what it is worth.

    Args:
        before: manifest of the bundle that was learned for.
        after: that of the version that was published.
        content_hash: of its model.
        default: the adapter that clients begin with now, and why.
        learned: the rates, and how they came about.
        clients: by role.
        judged: `atp` with these rates on those who judge.
    """

    before: Manifest
    after: Manifest
    content_hash: str
    default: str
    learned: Learned
    clients: Mapping[Role, Sequence[Client]]
    judged: Judgement


def learned_page(of: Lesson, made: Made) -> str:
    """The HTML of a lesson."""
    evidence = of.after.evidence
    assert evidence is not None
    about = {
        **identity(of.after, of.content_hash),
        "Learned for": of.before.key,
        "Clients": f"{len(of.clients['teach'])} teach, {len(of.clients['tune'])} tune, {evidence.of} judge",
        "Learning rate": f"{of.learned.lr:g}",
    }
    earned = not evidence.obstacle
    said = element(
        "p",
        element("strong", "atp earned its place" if earned else "atp did not earn its place"),
        f": {in_words(evidence)}.",
        class_="verdict" if earned else "verdict none",
    )
    why = element("p", f"{of.default[0].upper()}{of.default[1:]}.")
    return page(
        f"What was learned for {of.after.key}", made, said, why, facts(about), _before_and_after(of), _clients(of),
        _rates(of), _rounds(of), *_settings(of), *_budgets(of),
    )  # fmt: skip


def _before_and_after(of: Lesson) -> Element:
    rows = [_evidence(manifest.key, manifest.evidence) for manifest in (of.before, of.after)]
    heading = ("Version", "Adapter", "Gain", "95 % interval", "Worst client", "Harmed", "Clients")
    return section(
        "Evidence before and after",
        "What each version of the bundle knows of the adapter that is to be its default, from clients that nothing was "
        "learned from.",
        table("Evidence of both versions", heading, rows),
    )


def _evidence(name: str, told: Evidence | None) -> tuple[str, ...]:
    if told is None:
        return (name, "none", "-", "-", "-", "-", "-")
    between = f"{points(told.low)} to {points(told.high)}"
    return (name, told.adapter, points(told.gain), between, points(told.worst), percent(told.harmed, 0), told.of)


def _clients(of: Lesson) -> Element:
    """Gains of those who judged, by kind of shift."""
    judges, gains = of.clients["judge"], of.judged.gains.tolist()
    kinds = dict.fromkeys(client.kind for client in judges)
    told = [
        (KINDS[kind], [gain for client, gain in zip(judges, gains, strict=True) if client.kind == kind])
        for kind in kinds
    ]
    rows = [
        (client.name, client.shift, percent(frozen), percent(adapted), points(gain))
        for client, frozen, adapted, gain in zip(judges, of.judged.frozen, of.judged.accuracy, gains, strict=True)
    ]
    by_kind = [(kind, str(len(each)), points(sum(each) / len(each)), points(min(each))) for kind, each in told]
    return section(
        "Clients that judged",
        "A mark is one client: how many points it gains or loses with the learned rates, by kind of shift.",
        gains_by_client("Gain of each judging client in points, by kind of shift", told),
        table("Gain by kind of shift", ("Shift", "Clients", "Mean gain", "Worst client"), by_kind),
        folded(
            f"All {len(rows)} clients in numbers",
            table("Judging clients", ("Client", "Shift", "Frozen", "Adapted", "Gain"), rows),
        ),
    )


def _rates(of: Lesson) -> Element:
    rates = of.learned.rates
    return section(
        "Rates, module by module",
        "How far each module of the network follows its own direction in a client's data, in the order of the network. "
        "One that is 0 stays as it is; one below 0 goes against it.",
        bars("Adaptation rate of each module", [Bar(name, rate, f"{rate:+.3f}") for name, rate in rates.items()]),
        table("Rates", ("Module", "Rate"), [(name, f"{rate:+.5f}") for name, rate in rates.items()]),
    )


def _rounds(of: Lesson) -> Element:
    losses = dict(sorted(of.learned.losses.items()))
    best = min(losses, key=lambda number: losses[number])
    notes = [element("p", note) for note in of.learned.notes]
    chosen = list(losses).index(best)
    return section(
        "Round by round",
        f"Cross-entropy on the clients that tune, each batch adapted alone; the broken line is that of the frozen "
        f"model, {losses[0]:.3f}. {of.learned.rounds} rounds were run, and the rates after round {best} are kept: "
        f"{losses[best]:.3f}.",
        *notes,
        lines(
            "Cross-entropy on the tuning clients by round",
            "round",
            "cross-entropy",
            {"tuning clients": [(float(number), loss) for number, loss in losses.items()]},
            guide=losses[0],
        ),
        folded(
            "All looks at the tuning clients in numbers",
            table(
                "Cross-entropy by round",
                ("Round", "Cross-entropy"),
                [(str(number), f"{loss:.4f}") for number, loss in losses.items()],
                chosen,
            ),
        ),
    )


def _settings(of: Lesson) -> list[Element]:
    """Hyper-parameters that the bundle has of other adapters; no section where it has none."""
    if not of.after.settings:
        return []
    rows = [
        (name, json.dumps(dict(told.options)), points(told.gain), f"{points(told.low)} to {points(told.high)}",
         points(told.worst), percent(told.harmed, 0))
        for name, told in of.after.settings.items()
    ]  # fmt: skip
    heading = ("Adapter", "Hyper-parameters", "Gain", "95 % interval", "Worst client", "Harmed")
    return [
        section(
            "Settings of other adapters",
            "The best of a few for the clients that tune; the gain is that on the clients that judge.",
            table("Settings", heading, rows),
        )
    ]


def _budgets(of: Lesson) -> list[Element]:
    """How few bytes stored states may take; no section where nothing was shown."""
    if not of.after.state_budgets:
        return []
    rows = [
        (name, f"{told.nbytes / 1e3:,.1f} kB", f"{told.budget:.3g}", percent(told.other, 2), f"{-100 * told.lost:+.2f}")
        for name, told in of.after.state_budgets.items()
    ]
    heading = ("Adapter", "Stored state", "Share of exact bytes", "Answers that differ", "Points gained")
    return [
        section(
            "How small stored states may be",
            "The least budget that keeps the answers of exact states to the clients that tune.",
            table("Budgets of stored states", heading, rows),
        )
    ]
