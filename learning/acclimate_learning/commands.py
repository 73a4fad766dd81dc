"""What `acclimate learn`, `evaluate` and `models import-atp` do once their words are understood."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from acclimate_adapters import ADAPTERS, AcclimateError, FrozenModel, create, enrols, missing
from acclimate_adapters.portfolio import Portfolio
from acclimate_learning.asked import PORTFOLIO, Replay, with_labels
from acclimate_learning.budgets import choose_budget
from acclimate_learning.clients import FAMILIES_OF, Client, Population, Role, own_clients, read_pool, simulate
from acclimate_learning.errors import LearningError
from acclimate_learning.evaluation import Evaluation, in_words
from acclimate_learning.judging import Judgement, judge
from acclimate_learning.likeness import families_like, read_unlabelled
from acclimate_learning.rates import Recipe, learn_rates
from acclimate_learning.report import charts
from acclimate_learning.report.evaluated import evaluated_page, gains_chart
from acclimate_learning.report.learned import Lesson, learned_page
from acclimate_learning.report.page import Made
from acclimate_learning.settings import GRIDS, Options, choose_settings, judge_settings
from acclimate_store import BundleKey, Catalogue, Manifest
from acclimate_store.add_onnx import graphs_where_possible
from acclimate_store.bundle import Bundle
from acclimate_store.datasets import labelled_images
from acclimate_store.files import GRAPHS
from acclimate_store.manifest import SAFEST, Evidence, StateBudget
from acclimate_store.versions import model_with, next_version, publish, renewed

ERRORS: Final = (AcclimateError,)
"""What ends a command with its message alone."""
CHAINS: Final = ("atp+em", "atp+fedcal", "bn_adapt+em", "bn_adapt+fedcal")
NOT_UNASKED: Final = ("none", "memo", "portfolio")
"""What is not judged unless it is named: what all are compared with, what is slow, what needs labels."""


def learn(arguments: argparse.Namespace) -> int:
    """Learn rates, judge them, and publish the next version with both."""
    _require_places(arguments)
    catalogue, key, new = _versions(arguments)
    bundle = catalogue.load(*key)
    spec = bundle.manifest.input
    renewed(catalogue, bundle.manifest, new, "")  # refused now, before any work, if it will be
    tuned = _tuned(arguments.tune, bundle.model)
    clients = _simulated(arguments, bundle, ("teach", "tune", "judge"))
    recipe = Recipe(rounds=arguments.rounds, cohort=arguments.cohort, lr=arguments.lr, seed=arguments.seed)
    with _bar("client") as advance:
        learned = learn_rates(
            bundle.model, spec, clients["teach"], clients["tune"], recipe,
            checkpoint=arguments.checkpoint, progress=advance,
        )  # fmt: skip
    best = min(learned.losses, key=lambda number: learned.losses[number])
    print(
        f"learned in {learned.rounds} rounds with a learning rate of {learned.lr:g}; best after {best}: cross-entropy "
        f"{learned.losses[best]:.3f}, frozen {learned.losses[0]:.3f} ({len(clients['tune'])} tuning clients)"
    )
    for note in learned.notes:
        print(f"  note  {note}")
    if best == learned.rounds:
        print("the last rounds were the best: more --rounds may gain more, and a --checkpoint goes on with them")
    if best == 0:
        print("no round was better for the tuning clients than no adaptation: try a smaller --lr, or more --rounds")
    source = replace(bundle.model.source, rates=learned.rates)
    model = model_with(catalogue, key, source)
    judged = _judged_rates(arguments, bundle, model, clients["judge"])
    evidence = judged.evidence(_words(arguments, clients["judge"]))
    settings = {**bundle.manifest.settings, **_judged_settings(arguments, tuned, bundle, model, clients)}
    budgets = _judged_budgets(arguments, bundle, model, clients["tune"])
    made = f"Adaptation rates learned from {len(clients['teach'])} clients of {arguments.data.name}, {recipe}."
    changes = {"evidence": evidence, "settings": settings, "state_budgets": budgets}
    manifest = renewed(catalogue, bundle.manifest, new, made, **changes)
    _publish(arguments, catalogue, key, manifest, model)
    if arguments.report:
        default = str(manifest.default(not missing(create(SAFEST), model)))
        lesson = Lesson(bundle.manifest, manifest, model.content_hash, default, learned, clients, judged)
        _write(arguments.report, learned_page(lesson, Made.now(arguments.words)))
    return 0


def import_atp(arguments: argparse.Namespace) -> int:
    """Publish the next version with rates by position, in the order of the authors' program."""
    catalogue, key, new = _versions(arguments)
    bundle = catalogue.load(*key)
    order = authors_order(bundle.model)
    values = _rates_of(arguments.rates)
    if len(values) != len(order):
        raise LearningError(
            f"{arguments.rates} holds {len(values)} rates, the network has {len(order)} modules: {', '.join(order)}"
        )
    rates = dict(zip(order, values, strict=True))
    made = f"Adaptation rates of {arguments.rates.name}."
    manifest = renewed(catalogue, bundle.manifest, new, made, evidence=None, state_budgets={})
    model = model_with(catalogue, key, replace(bundle.model.source, rates=rates))
    _publish(arguments, catalogue, key, manifest, model)
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Judge adapters, print a table and what to choose, and publish it if asked."""
    if (arguments.clients is None) == (arguments.data is None):
        raise LearningError("give --clients, labelled streams, or --data, images from which clients are simulated")
    _require_places(arguments)
    replay = _replay(arguments) if arguments.asked else None
    catalogue, key, new = _versions(arguments)
    bundle = catalogue.load(*key)
    if arguments.write:
        renewed(catalogue, bundle.manifest, new, "")
    clients = _streams(arguments, bundle)
    settings = bundle.manifest.options
    names = _candidates(arguments.adapters, bundle.model, settings)
    of = _words(arguments, clients)
    with _bar("client") as advance:

        def judged(name: str) -> Judgement:
            spec, options = bundle.manifest.input, settings.get(name)
            return judge(bundle.model, spec, clients, name, options, progress=lambda: advance(name))

        found = Evaluation(bundle.manifest, of, clients, [judged(name) for name in names])
        if replay is not None and names:
            found = _asked(arguments.asked, found, judged, bundle.model, replay)
    print(found.table())
    if arguments.json:
        arguments.json.write_text(json.dumps(found.figures(), indent=2) + "\n")
    if arguments.picture:
        arguments.picture.write_text(charts.file(gains_chart(found.evidence)))
    published = ""
    if arguments.write:
        kept = {file: catalogue.directory(key) / file for file in GRAPHS if file in bundle.manifest.files}
        evidence = found.recommended or found.refuted
        manifest = renewed(catalogue, bundle.manifest, new, f"Default adapter judged on {of}.", evidence=evidence)
        publish(catalogue, key, manifest, bundle.model.source, kept)
        published = f"{new}: published, {manifest.default(not missing(create(SAFEST), bundle.model))}"
        print(published)
    if arguments.report:
        made = Made.now(arguments.words)
        _write(arguments.report, evaluated_page(found, bundle.model.content_hash, made, published))
    return 0


def authors_order(model: FrozenModel) -> tuple[str, ...]:
    """Names of the modules in the order of the authors' program: layer by layer, running statistics first."""
    layers = list(dict.fromkeys(name.rpartition(".")[0] for name in model.parameters))
    for name in model.statistics:  # of layers that have no weight
        layer = name.rpartition(".")[0]
        if layer not in layers:
            layers.append(layer)
    kinds = ("running_mean", "running_var", "weight", "bias")
    known = set(model.modules)
    ordered = [f"{layer}.{kind}" for layer in layers for kind in kinds if f"{layer}.{kind}" in known]
    others = [name for name in model.modules if name not in ordered]
    return (*ordered, *others)


def _rates_of(path: Path) -> list[float]:
    try:
        if path.suffix == ".npy":
            values: Any = np.load(path, allow_pickle=False)
        elif path.suffix == ".json":
            values = json.loads(path.read_text())
        else:
            values = torch.load(path, map_location="cpu", weights_only=True)
        if isinstance(values, Mapping):
            values = next((values[name] for name in ("rates", "adapt_lrs", "alpha") if name in values), values)
        return torch.as_tensor(values, dtype=torch.float64).flatten().tolist()
    except Exception as error:  # unpickling raises anything
        raise LearningError(f"{path} cannot be read as a list of numbers: {error}") from error


def _versions(arguments: argparse.Namespace) -> tuple[Catalogue, BundleKey, BundleKey]:
    catalogue = Catalogue(arguments.store, allowed_imports=tuple(arguments.allow_import))
    key = catalogue.resolve(*BundleKey.parse(arguments.bundle))
    newest = catalogue.resolve(key.name)
    return catalogue, key, BundleKey(key.name, arguments.version or next_version(newest))


def _simulated(arguments: argparse.Namespace, bundle: Bundle, roles: Sequence[Role]) -> dict[Role, list[Client]]:
    data = labelled_images(arguments.data, bundle.manifest.input, bundle.manifest.classes, arguments.by)
    pool = read_pool(data)
    families = FAMILIES_OF
    if arguments.like is not None:
        families = families_like(read_unlabelled(arguments.like, bundle.manifest.input), pool, arguments.seed)
        for role in roles:
            print(f"like {arguments.like.name}: clients that {role} have {', '.join(families[role])}")
    population = Population(
        shift=arguments.shift,
        partition=arguments.partition,
        teachers=arguments.teachers,
        judges=arguments.judges,
        teacher_images=arguments.teacher_images,
        judge_images=arguments.judge_images,
        seed=arguments.seed,
        families=families,
    )
    return {role: simulate(pool, population, role) for role in roles}


def _streams(arguments: argparse.Namespace, bundle: Bundle) -> list[Client]:
    """Labelled streams: simulated, or those of real clients."""
    if arguments.data is not None:
        return _simulated(arguments, bundle, ("judge",))["judge"]
    spec, classes = bundle.manifest.input, bundle.manifest.classes
    if arguments.by is not None:
        return own_clients(read_pool(labelled_images(arguments.clients, spec, classes, arguments.by)))
    if not arguments.clients.is_dir():
        raise LearningError(
            f"{arguments.clients} is no folder with a folder per client; data in a file need --by COLUMN"
        )
    found = []
    for folder in sorted(path for path in arguments.clients.iterdir() if path.is_dir()):
        pool = read_pool(labelled_images(folder, spec, classes))
        order = np.random.default_rng(arguments.seed).permutation(len(pool.labels))  # files lie class by class
        found.append(Client(folder.name, pool.images[order], pool.labels[order], "its own", "own"))
    return found


def _require_places(arguments: argparse.Namespace) -> None:
    """Refuse at once, and not after an hour, what cannot be written."""
    for option in ("json", "picture", "report"):
        path = getattr(arguments, option, None)
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise LearningError(f"--{option} {path}: give a file in a folder that is there")


def _write(path: Path, report: str) -> None:
    """Write a report; of a name that is no text, such as that of a folder in another encoding, the bytes are shown."""
    path.write_bytes(report.encode(errors="backslashreplace"))


def _replay(arguments: argparse.Namespace) -> Replay:
    try:
        found: Replay = arguments.replay()
    except ModuleNotFoundError as error:
        raise LearningError(f'--asked needs {error.name}; pip install "acclimate[serve]"') from error
    return found


def _asked(
    shares: Sequence[float],
    found: Evaluation,
    judged: Callable[[str], Judgement],
    model: FrozenModel,
    replay: Replay,
) -> Evaluation:
    """The evaluation with what labels make of each adapter, and of a portfolio if there are arms for one."""
    budgets = sorted(set(shares))
    asked = [
        with_labels(told, share, replay) for told in found.judged if told.adapter != PORTFOLIO for share in budgets
    ]
    portfolio = create(PORTFOLIO, **found.manifest.options.get(PORTFOLIO, {}))
    if isinstance(portfolio, Portfolio) and portfolio.served(model):
        told = next((each for each in found.judged if each.adapter == PORTFOLIO), None) or judged(PORTFOLIO)
        asked = [*(with_labels(told, share, replay, portfolio, model) for share in budgets), *asked]
        found = replace(found, portfolio=told)
    return replace(found, asked=asked)


def _candidates(asked: str | None, model: FrozenModel, settings: Mapping[str, Options]) -> list[str]:
    if asked is not None:
        names = [name.strip() for name in asked.split(",")]
        for name in names:
            lacking = missing(create(name, **settings.get(name, {})), model)
            if lacking:
                raise LearningError(f"{name} needs {', '.join(lacking)}, which the bundle does not have")
        return names
    everything = [name for name in (*sorted(ADAPTERS), *CHAINS) if name not in NOT_UNASKED]
    unasked = {name: missing(create(name, **settings.get(name, {})), model) for name in everything}
    left_out = [f"{name} lacks {', '.join(absent)}" for name, absent in unasked.items() if absent]
    if left_out:
        print(f"not judged: {'; '.join(left_out)}")
    return [name for name, absent in unasked.items() if not absent]


def _tuned(asked: str | None, model: FrozenModel) -> list[str]:
    """Adapters whose hyper-parameters are to be chosen: all that can be served once there are rates, or those named."""
    tried = {name: create(name, **next(grid(model))) for name, grid in GRIDS.items()}
    lacking = {name: set(missing(adapter, model)) - {"rates"} for name, adapter in tried.items()}
    if asked is None:
        return [name for name, absent in lacking.items() if not absent]
    names = [name.strip() for name in asked.split(",")] if asked != "none" else []
    for name in names:
        if name not in GRIDS:
            raise LearningError(
                f"--tune: there is nothing to choose for {name}; write some of {','.join(GRIDS)}, or none"
            )
        if lacking[name]:
            raise LearningError(
                f"--tune: {name} needs {', '.join(sorted(lacking[name]))}, which the bundle does not have"
            )
    return names


def _judged_rates(
    arguments: argparse.Namespace, bundle: Bundle, model: FrozenModel, clients: list[Client]
) -> Judgement:
    with _bar("client") as advance:
        told = judge(model, bundle.manifest.input, clients, "atp", progress=lambda: advance("judging"))
    evidence = told.evidence(_words(arguments, clients))
    print(f"atp on {evidence.clients} held-out clients: {in_words(evidence)}")
    kinds = sorted({client.kind for client in clients})
    for kind in kinds if len(kinds) > 1 else ():
        rows = [index for index, client in enumerate(clients) if client.kind == kind]
        print(f"  {kind:<8} {100 * float(told.gains[rows].mean()):+.1f} points on {len(rows)} clients")
    return told


def _judged_settings(
    arguments: argparse.Namespace,
    tuned: Sequence[str],
    bundle: Bundle,
    model: FrozenModel,
    clients: Mapping[Role, list[Client]],
) -> dict[str, Evidence]:
    """Hyper-parameters of some adapters, with what they gain on held-out clients."""
    spec, found = bundle.manifest.input, dict[str, Evidence]()
    for name in tuned:
        with _bar("client") as advance:
            options = choose_settings(model, spec, clients["tune"], name, lambda: advance(f"tuning {name}"))  # noqa: B023
            told = judge_settings(model, spec, clients["judge"], name, options, lambda: advance(f"judging {name}"))  # noqa: B023
        enrolled = enrols(create(name))
        of = _words(arguments, clients["judge"])
        found[name] = told.evidence(f"{of}, enrolled and then served half of another's images" if enrolled else of)
        who = f"{len(clients['tune'])} tuning clients{' that enrol' if enrolled else ''}"
        print(f"{name}: {json.dumps(options)} is best for {who};")
        print(f"  on {len(clients['judge'])} held-out clients {in_words(found[name])}")
    return found


def _judged_budgets(
    arguments: argparse.Namespace, bundle: Bundle, model: FrozenModel, clients: list[Client]
) -> dict[str, StateBudget]:
    """How few bytes stored states may take, by adapter; of `atp` alone, whose rates are new."""
    with _bar("client") as advance:
        found = choose_budget(
            model,
            bundle.manifest.input,
            clients,
            "atp",
            _words(arguments, clients),
            progress=lambda: advance("storing"),
        )
    if found is None:
        return {}
    print(
        f"atp states may be stored in {found.nbytes / 1e3:,.1f} kB, a budget of {found.budget:.3g}: "
        f"{100 * found.other:.2f} % of the answers to {len(clients)} tuning clients differ from those of exact states, "
        f"{100 * -found.lost:+.2f} points"
    )
    return {"atp": found}


def _publish(
    arguments: argparse.Namespace, catalogue: Catalogue, key: BundleKey, manifest: Manifest, model: FrozenModel
) -> None:
    graphs, notes = ({}, ()) if arguments.no_onnx else graphs_where_possible(model, manifest.input.shape)
    publish(catalogue, key, manifest, model.source, graphs)
    print(f"{manifest.key}: published, {manifest.default(not missing(create(SAFEST), model))}")
    for note in notes:
        print(f"  note  {note}")


def _words(arguments: argparse.Namespace, clients: Sequence[Client]) -> str:
    path = arguments.data or arguments.clients
    if arguments.data is None or arguments.by:
        return f"{len(clients)} clients of {path.name}"
    like = f", like {arguments.like.name}" if arguments.like else ""
    return f"{len(clients)} simulated clients of {path.name}, shift {arguments.shift}{like}, seed {arguments.seed}"


@contextmanager
def _bar(unit: str) -> Iterator[Callable[[str], None]]:
    from tqdm import tqdm

    with tqdm(unit=unit, disable=None, leave=False, file=sys.stderr) as bar:

        def advance(what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update()

        yield advance
