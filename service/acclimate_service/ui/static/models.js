// The models that are served, and what labels say of their adapters.

import { read } from "./api.js";
import { Failure, percent, usePolling, Verdict } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

const Evidence = ({ model }) => {
  const { value, error } = usePolling(() => read(`models/${encodeURIComponent(model)}/adapters`), 10, [model]);
  if (!value) return html`<${Failure} of=${error} />`;
  return html`<h3>What labels say</h3><p>Policy: ${value.policy}.</p>
    <div class="scroll" tabindex="0" role="region" aria-label=${`Evidence of ${model}`}><table>
      <thead><tr>${["Adapter", "Clients", "Labels", "Wins", "Losses", "Frozen", "Adapted", "Verdict"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
      <tbody>${value.adapters.map(({ adapter, hyperparameters, clients, candidate, guard }) => html`<tr>
        <th scope="row">${adapter} ${Object.keys(hyperparameters).length ? JSON.stringify(hyperparameters) : ""} ${candidate ? "(candidate)" : ""}</th>
        <td>${clients}</td><td>${guard.labelled}</td><td>${guard.wins}</td><td>${guard.losses}</td>
        <td>${percent(guard.frozen.accuracy)}</td><td>${percent(guard.adapted.accuracy)}</td><td><${Verdict} of=${guard.verdict} /></td></tr>`)}
      </tbody></table></div>${value.adapters.length ? "" : html`<p>No labels were told yet.</p>`}`;
};

export const Models = () => {
  const { value, error } = usePolling(() => read("models"), 30, []);
  return html`<h1>Models</h1><${Failure} of=${error} />
    ${value?.models.map((model) => {
      const facts = {
        Version: model.version,
        Architecture: model.architecture,
        Runtime: model.runtime,
        Layout: model.layout,
        Input: `${model.input.channels} × ${model.input.height} × ${model.input.width}`,
        Classes: model.classes.join(", "),
        "Default adapter": `${model.default_adapter.name}: ${model.default_adapter.reason}`,
      };
      return html`<section key=${model.name}><h2>${model.name}${model.default ? " (default)" : ""}</h2>
        <dl class="facts">${Object.entries(facts).map(([name, fact]) => html`<div><dt>${name}</dt><dd>${fact}</dd></div>`)}</dl>
        <h3>Adapters</h3><p>${Object.entries(model.adapters).map(([name, { available, missing }]) => html`<span class="chip ${available ? "" : "off"}">
          ${name}${available ? "" : ` lacks ${missing.join(", ")}`}</span> `)}</p>
        <${Evidence} model=${model.name} /></section>`;
    })}`;
};
