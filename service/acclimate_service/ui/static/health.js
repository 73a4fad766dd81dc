// Whether the replica that answers this page is well: readiness, queue, memory, latency.

import { read, readText } from "./api.js";
import { Failure, number, usePolling } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

const SAMPLE = /^([a-z_:0-9]+)(?:\{(.*)\})? (\S+)/i;

const parse = (text) =>
  text.split("\n").flatMap((line) => {
    const [, name, labels = "", value] = line.match(SAMPLE) ?? [];
    return name ? [{ name, labels: Object.fromEntries([...labels.matchAll(/(\w+)="((?:\\.|[^"])*)"/g)].map((each) => each.slice(1))), value: Number(value) }] : [];
  });

// The share q of a histogram's observations took at most so long.
const quantile = (buckets, q) => {
  const most = buckets.at(-1)?.value ?? 0;
  return most ? buckets.find((bucket) => bucket.value >= q * most).le : undefined;
};

// The buckets of a histogram by some of its labels, over all others.
const histogram = (samples, wanted, by) => {
  const routes = new Map();
  for (const { name, labels, value } of samples) {
    if (name !== `${wanted}_bucket`) continue;
    const { le } = labels, route = by.map((label) => labels[label]).join(" ");
    const buckets = routes.get(route) ?? new Map();
    buckets.set(le, (buckets.get(le) ?? 0) + value);
    routes.set(route, buckets);
  }
  return [...routes].map(([route, buckets]) => [route, [...buckets].map(([le, value]) => ({ le: le === "+Inf" ? Infinity : Number(le), value }))]);
};

const within = (seconds) => (seconds == null ? "–" : seconds === Infinity ? "more" : `≤ ${number(1000 * seconds)} ms`);

const Latency = ({ title, of }) => html`<h2>${title}</h2>
  <div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
    <thead><tr><th scope="col">What</th><th scope="col">Number</th><th scope="col">Half of them</th><th scope="col">95 %</th></tr></thead>
    <tbody>${of.map(([what, buckets]) => html`<tr key=${what}><th scope="row">${what || "all"}</th><td>${number(buckets.at(-1).value)}</td>
      <td>${within(quantile(buckets, 0.5))}</td><td>${within(quantile(buckets, 0.95))}</td></tr>`)}</tbody>
  </table></div>`;

export const Health = () => {
  const { value: ready, error } = usePolling(() => read("v2/health/ready"), 2, []);
  const { value: text, error: refused } = usePolling(() => readText("metrics"), 2, []);
  const samples = parse(text ?? "");
  const gauges = samples.filter(({ name, labels }) => /^acclimate_(waiting|state_(sessions|cache_bytes|journal_entries|journal_bytes|unreplicated.*))$/.test(name) && !Object.keys(labels).length);
  return html`<h1>Health</h1><${Failure} of=${error} />
    ${ready && html`<p><strong>${ready.ready ? "✓ Ready" : `✕ Not ready: ${ready.reason}`}</strong></p>
      ${ready.failing.map(({ task, error: kind, seconds }) => html`<p class="failure">${task} fails in the background for ${seconds} s: ${kind}</p>`)}`}
    <${Failure} of=${refused} />
    <dl class="facts">${gauges.map(({ name, value }) => html`<div key=${name}><dt>${name.replace("acclimate_", "").replaceAll("_", " ")}</dt><dd>${number(value)}</dd></div>`)}</dl>
    <${Latency} title="Latency by route" of=${histogram(samples, "acclimate_request_duration_seconds", ["method", "route"])} />
    <${Latency} title="Phases of requests" of=${histogram(samples, "acclimate_phase_seconds", ["phase"])} />
    <${Latency} title="Redis" of=${histogram(samples, "acclimate_redis_seconds", [])} />`;
};
