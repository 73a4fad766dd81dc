// One client: what became of it, what its labels show, and what can be done to it.

import { change, pathOf, read, watch } from "./api.js";
import { Chart, Modules } from "./charts.js";
import { Label } from "./label.js";
import { Facts, Failure, number, percent, Question, Table, time, usePolling, Verdict } from "./parts.js";
import { html, useEffect, useState } from "./vendor/preact-htm.js";

const CHARTS = [
  ["Entropy, nats", ["entropy", "frozen_entropy"]],
  ["Agreement with the frozen model", ["agreement", "agreed"]],
  ["Shift", ["shift", "label_shift", "uncertainty_shift", "representation_shift"]],
  ["Rates and weights", ["learning_rate", "mean_rate", "global_weight", "alignment"]],
];

const AGAIN = 300; // points that come before the timeline, which the service thins out, is read again

// The timeline of a client by its path, and what comes after it, as it happens.
const useTimeline = (path) => {
  const [found, setFound] = useState({ points: [] });
  useEffect(() => {
    const end = new AbortController();
    let came = 0;
    const load = async () => {
      const timeline = await read(`${path}/timeline`);
      if (!end.signal.aborted) setFound(timeline);
      return timeline;
    };
    const tell = (point) => {
      setFound((before) => ({ ...before, points: [...before.points.filter(({ version }) => version < point.version), point] }));
      if (++came % AGAIN === 0) load().catch(() => {}); // what there is stays
    };
    load().then(
      (timeline) => watch(path, timeline.points.at(-1)?.version ?? 0, tell, end.signal),
      (error) => setFound({ points: [], error }),
    );
    return () => end.abort();
  }, [path]);
  return found;
};

const Prior = ({ timeline }) => {
  const latest = timeline.points.findLast((point) => point.prior)?.prior;
  if (!latest) return null;
  const training = timeline.training_prior ?? [];
  return html`<section><h2>Estimated and training prior</h2>
    <${Table} name="Priors" kind="prior" head=${["Class", "Training", "Estimated", html`<span class="unseen">Bars</span>`]}>
      ${latest.map(
        (share, k) => html`<tr key=${k}><th scope="row">${timeline.classes[k]}</th><td>${percent(training[k])}</td>
          <td>${percent(share)}</td><td class="bars" aria-hidden="true">
            <i style=${{ width: `${100 * (training[k] ?? 0)}%` }}></i><b style=${{ width: `${100 * share}%` }}></b></td></tr>`,
      )}<//></section>`;
};

const Guard = ({ of }) => {
  if (!of) return null;
  const bar = ({ low, accuracy, high }, y, colour) =>
    accuracy != null &&
    html`<line x1=${100 * low} x2=${100 * high} y1=${y} y2=${y} class=${colour} /><circle cx=${100 * accuracy} cy=${y} r="1.6" class=${colour} />`;
  const row = (name, { accuracy, low, high }) =>
    html`<tr><th scope="row">${name}</th><td>${percent(accuracy)}</td><td>${accuracy == null ? "–" : `${percent(low)} to ${percent(high)}`}</td></tr>`;
  return html`<section><h2>Labels</h2>
    <p><${Verdict} of=${of.verdict} /> after ${of.labelled} labels: ${of.wins} wins, ${of.losses} losses. Answered by the
      ${" "}<strong>${of.answering}</strong> model (${of.because.replaceAll("_", " ")}).</p>
    <table><thead><tr><th scope="col">Model</th><th scope="col">Accuracy</th><th scope="col">Interval</th></tr></thead>
      <tbody>${row("frozen", of.frozen)}${row("adapted", of.adapted)}</tbody></table>
    ${of.labelled > 0 && of.frozen.accuracy == null && html`<p>Labels of rows that were asked for tell which model is better, and no accuracy.</p>`}
    ${of.frozen.accuracy != null && html`<svg viewBox="-2 0 104 14" class="intervals" aria-hidden="true">
      <line x1="0" x2="100" y1="13" y2="13" class="axis" />${bar(of.frozen, 4, "frozen")}${bar(of.adapted, 9, "adapted")}
    </svg>`}</section>`;
};

// What can be done: its name, what the question says, what is sent.
const actionsOf = (id, path, client, adapters) => {
  const paused = client.adaptation === "paused";
  return {
    Reset: { says: html`<p>Everything that was learned for ${id} is given up; it begins again from the global model.</p>`,
      send: () => change("POST", `${path}/reset`) },
    "Roll back": { off: !client.state.kept.length, says: html`<p>${id} goes on from an earlier state; what it learned since is given up.</p>
        <label>Version <select name="version">${client.state.kept.map(
          (kept) => html`<option value=${kept.version}>${kept.version}, of ${time(kept.at)}</option>`)}</select></label>`,
      send: (form) => change("POST", `${path}/rollback`, { version: Number(form.get("version")) }) },
    [paused ? "Resume" : "Pause"]: {
      says: html`<p>${paused ? `Batches of ${id} are folded in again.` : `Batches of ${id} are answered and no longer folded in.`}</p>`,
      send: () => change("PUT", path, { adaptation: paused ? "running" : "paused" }) },
    Configure: { says: html`<p>With another adapter ${id} begins again from the global model.</p>
        <label>Adapter <select name="adapter">${adapters.map(
          (name) => html`<option value=${name} selected=${name === client.adapter}>${name}</option>`)}</select></label>
        <label>Hyper-parameters, as JSON <textarea name="hyperparameters" rows="3">${JSON.stringify(client.hyperparameters)}</textarea></label>`,
      send: (form) => change("PUT", path, { adapter: form.get("adapter"), hyperparameters: JSON.parse(form.get("hyperparameters") || "{}") }) },
    Delete: { says: html`<p>${id}, its state, its timeline and all that was learned for it are removed.</p>`, gone: true,
      send: () => change("DELETE", path) },
  };
};

export const Client = ({ model, of, id, go }) => {
  const path = pathOf(of, id);
  const timeline = useTimeline(path);
  const [asked, setAsked] = useState();
  const [done, setDone] = useState("");
  const newest = timeline.points.at(-1)?.version;
  const { value: client, error } = usePolling(() => read(path), 5, [path, newest, done]);
  const { value: offered } = usePolling(async () => (of ? undefined : read("adapters")), 600, [of]);
  if (!client) return html`<h1>${id}</h1><${Failure} of=${error} />`;
  const known = offered?.adapters ?? Object.entries(model.adapters).map(([name, each]) => ({ name, ...each }));
  const adapters = new Set([client.adapter, ...known.filter(({ available }) => available).map(({ name }) => name)]);
  const actions = actionsOf(id, path, client, [...adapters]);
  const act = async (form) => {
    await actions[asked].send(form);
    setDone(`${asked} of ${id}: done at ${new Date().toLocaleTimeString()}.`);
    setAsked(undefined);
    if (actions[asked].gone) go("", { model: of });
  };
  const facts = {
    Model: `${client.model.name} ${client.model.version}`,
    Adapter: `${client.adapter} ${Object.keys(client.hyperparameters).length ? JSON.stringify(client.hyperparameters) : ""}`,
    Adaptation: client.adaptation,
    Version: client.state.version,
    "Bytes in Redis": number(client.state.bytes),
    "In memory of this replica": client.state.tier === "memory" ? "yes" : "no",
    "Written by": client.state.owner ?? "–",
    "Last change": time(timeline.points.at(-1)?.at),
    "Forgotten without a batch for": `${number(client.state.expires_in_s / 3600)} hours`,
  };
  return html`<h1>${id}</h1>
    <${Failure} of=${error} />
    <div class="buttons">${Object.entries(actions).map(
      ([name, { off }]) => html`<button key=${name} class=${name === "Delete" ? "do" : ""} disabled=${off} onClick=${() => setAsked(name)}>${name}</button>`)}</div>
    <p role="status" class="done">${done}</p>
    <${Facts} of=${facts} />
    <${Failure} of=${timeline.error} />
    <div class="charts">${CHARTS.map(([title, names]) => html`<${Chart} key=${title} title=${title} names=${names} of=${timeline.points} />`)}</div>
    <div class="columns"><${Guard} of=${client.guard} /><${Prior} timeline=${timeline} /></div>
    <${Label} path=${path} classes=${model.classes} told=${setDone} />
    <${Modules} of=${timeline.points} />
    ${asked && html`<${Question} title=${`${asked} ${id}?`} yes=${asked} onYes=${act} onNo=${() => setAsked(undefined)}>${actions[asked].says}<//>`}`;
};
