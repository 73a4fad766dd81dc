// A model that is served: what it is, what was shown of it before, and what labels say of its adapters now.

import { read } from "./api.js";
import { Shaded } from "./charts.js";
import { Choice, Facts, Failure, number, percent, points, Table, usePolling, Verdict } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

const options = (of) => (Object.keys(of).length ? JSON.stringify(of) : "");

const Evidence = ({ model }) => {
  const { value, error } = usePolling(() => read(`models/${encodeURIComponent(model)}/adapters`), 5, [model]);
  if (!value) return html`<h2>What labels say</h2><${Failure} of=${error} />`;
  const head = ["Adapter", "Clients", "Labels", "Wins", "Losses", "Frozen", "Adapted", "Verdict"];
  return html`<h2>What labels say</h2><p>Who answers clients without a verdict of their own: ${value.policy}.</p>
    ${value.adapters.length ? html`<${Table} name=${`What labels say of ${model}`} head=${head}>
      ${value.adapters.map(({ adapter, hyperparameters, clients, candidate, guard }) => html`<tr>
        <th scope="row">${adapter} ${options(hyperparameters)} ${candidate ? "(candidate)" : ""}</th>
        <td>${clients}</td><td>${guard.labelled}</td><td>${guard.wins}</td><td>${guard.losses}</td>
        <td>${percent(guard.frozen.accuracy)}</td><td>${percent(guard.adapted.accuracy)}</td><td><${Verdict} of=${guard.verdict} /></td></tr>`)}<//>`
      : html`<p>No labels were told yet.</p>`}`;
};

// What was shown before deployment, of the default adapter and of settings for others.
const Shown = ({ manifest: { evidence, settings, measured } }) => {
  const every = [...(evidence ? [evidence] : []), ...Object.values(settings)];
  return html`<h2>Shown before deployment</h2>
    ${measured && html`<p>Frozen, on ${measured.data}: ${percent(measured.accuracy)} of ${number(measured.rows.reduce((a, b) => a + b, 0))} images.</p>`}
    ${every.length ? html`<${Table} name="Shown before deployment" head=${["Adapter", "Gain, points", "Interval", "Worst client", "Harmed", "Clients", "On"]}>
      ${every.map((each) => html`<tr><th scope="row">${each.adapter} ${options(each.options)}</th><td>${points(each.gain)}</td>
        <td>${points(each.low)} to ${points(each.high)}</td><td>${points(each.worst)}</td><td>${percent(each.harmed)}</td>
        <td>${each.clients}</td><td>${each.of}</td></tr>`)}<//>` : html`<p>Nothing: the manifest has no evidence.</p>`}`;
};

const Rates = ({ of }) => {
  const rates = Object.entries(of ?? {}), most = Math.max(...rates.map(([, rate]) => Math.abs(rate)), 1e-12);
  return html`<section><h2>Adaptation rates</h2>
    ${of ? html`<${Table} name="Adaptation rates" kind="heat" head=${["Module", "Rate"]}>
      ${rates.map(([name, rate]) => html`<tr key=${name}><th scope="row">${name}</th><${Shaded} value=${rate} most=${most} /></tr>`)}<//>`
      : html`<p>None were learned.</p>`}</section>`;
};

const Manifest = ({ manifest }) => {
  const { input, metrics } = manifest;
  const said = {
    Licence: manifest.licence,
    Provenance: manifest.provenance,
    "Mean and deviation of pixels": `${input.mean.map(number).join(", ")}; ${input.std.map(number).join(", ")}`,
    "Encoded images": input.resize ? `resized to ${JSON.stringify(input.resize.size)}, ${input.resize.interpolation}` : "must have the size of the input",
    ...metrics,
  };
  return html`<section><h2>Manifest</h2><${Table} name="Manifest" kind="said" head=${["What", "Value"]}>
    ${Object.entries(said).map(([name, value]) => html`<tr key=${name}><th scope="row">${name}</th>
      <td>${typeof value === "number" ? number(value) : value}</td></tr>`)}
    ${Object.entries(manifest.files).map(([name, sum]) => html`<tr key=${name}><th scope="row">${name}, SHA-256</th><td>${sum}</td></tr>`)}<//></section>`;
};

// Which version answers whom, and which replica could not load what; without the right to see that, what is served.
const Versions = ({ model, of }) => {
  const { value: rollout } = usePolling(() => read(`models/${encodeURIComponent(model)}/rollout`), 5, [model]);
  const loaded = new Map(rollout?.versions.map((each) => [each.version, each]));
  const role = ({ version, served }) =>
    !rollout ? (served ? "✓ served" : "in the store")
      : !loaded.has(version) ? "in the store"
      : version === rollout.shadow?.version ? `nobody, shadow of ${percent(rollout.shadow.share)} of the batches`
      : `${percent(loaded.get(version).share)} of the clients${version === rollout.canary?.version ? ", canary" : version === rollout.default ? ", default" : ""}`;
  const failures = (rollout?.replicas ?? []).flatMap(({ replica, failed }) => Object.entries(failed).map(([version, why]) => `${replica} could not load ${version}: ${why}`));
  return html`<section><h2>Versions</h2><${Table} name="Versions" head=${["Version", "Answers"]}>
    ${of.map((each) => html`<tr key=${each.version}><th scope="row">${each.version}</th><td>${role(each)}</td></tr>`)}<//>
    ${failures.map((each) => html`<p class="failure">${each}</p>`)}
    ${rollout && !rollout.done && html`<p>Replicas still follow the last change.</p>`}</section>`;
};

export const Models = ({ models, name, go }) => {
  const model = models.find((each) => each.name === name) ?? models[0];
  const { value: of, error } = usePolling(() => read(`models/${encodeURIComponent(model.name)}/manifest`), 10, [model.name]);
  const facts = {
    Version: model.version,
    Architecture: model.architecture,
    Runtime: model.runtime,
    Layout: model.layout,
    Input: `${model.input.channels} × ${model.input.height} × ${model.input.width}`,
    Classes: model.classes.join(", "),
    "Default adapter": `${model.default_adapter.name}: ${model.default_adapter.reason}`,
  };
  return html`<h1>${model.name}${model.default ? " (default)" : ""}</h1>
    ${models.length > 1 && html`<${Choice} label="Model" value=${model.name} of=${models.map((each) => each.name)}
      onChoose=${(chosen) => go(`models/${chosen}`, {})} />`}
    <${Facts} of=${facts} />
    <h2>Adapters</h2><p>${Object.entries(model.adapters).map(([adapter, { available, missing }]) => html`<span key=${adapter}
      class="chip ${available ? "" : "off"}">${adapter}${available ? "" : ` lacks ${missing.join(", ")}`}</span> `)}</p>
    <${Evidence} model=${model.name} />
    <${Failure} of=${error} />
    ${of && html`<${Shown} manifest=${of.manifest} />
      <div class="columns"><${Rates} of=${of.rates} /><${Versions} model=${model.name} of=${of.versions} /></div><${Manifest} manifest=${of.manifest} />`}`;
};
