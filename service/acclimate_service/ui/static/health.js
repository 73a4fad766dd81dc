// Whether the service is well: its replicas, what they hold, how long the stages of requests take, and Redis.

import { read } from "./api.js";
import { Facts, Failure, number, Table, time, usePolling } from "./parts.js";
import { html } from "./vendor/preact-htm.js";

const STAGES = [
  ["answer", "Answers, whole"],
  ["parse", "Reading the request"],
  ["decode", "of it, decoding"],
  ["queue", "Waiting for its turn"],
  ["compute", "Computing"],
  ["store", "Waiting for Redis"],
  ["redis", "Exchanges with Redis"],
];
const megabytes = (bytes) => number(bytes / 1e6);
const within = (stage, seconds) => (!stage?.number ? "–" : seconds == null ? "more" : `≤ ${number(1000 * seconds)} ms`);
const called = ({ id, name }, all) => (all.filter((each) => each.name === name).length > 1 ? id : name);

const Ready = ({ of }) => of.ready
  ? html`<p class="ready"><strong>✓ Ready</strong></p>`
  : html`<p class="failure" role="alert">✕ Not ready: ${of.reason}</p>`;

const FACTS = [
  ["State", (each) => (each.ready ? "✓ ready" : html`<span class="harmful">✕ ${each.reason}</span>`)],
  ["Fails in the background", (each) => each.failing.join(", ") || "nothing"],
  ["Said so", (each) => `${number(each.age_s)} s ago`],
  ["Started", (each) => time(each.started_at)],
  ["Version", (each) => each.version],
  ["Device", (each) => each.device],
  ["Models", (each) => each.models.join(", ")],
  ["Batches under way", (each) => number(each.waiting)],
  ["Clients in memory", (each) => number(each.clients_in_memory)],
  ["their states, MB", (each) => megabytes(each.state_bytes)],
  ["Leases: journals it writes", (each) => number(each.leases)],
  ["their entries", (each) => number(each.journal_entries)],
  ["their size, MB", (each) => megabytes(each.journal_bytes)],
];

const Replicas = ({ of }) => html`<h2>Replicas</h2><${Table} name="Replicas" head=${["What", ...of.map((each) => called(each, of))]}>
  ${FACTS.map(([name, fact]) => html`<tr key=${name}><th scope="row">${name}</th>${of.map((each) => html`<td>${fact(each)}</td>`)}</tr>`)}<//>`;

const Latency = ({ of }) => html`<h2>Latency by stage, within a minute</h2>
  <${Table} name="Latency by stage" head=${["Stage", ...of.flatMap((each) => ["number", "half", "95 %"].map((what) => `${called(each, of)}: ${what}`))]}>
    ${STAGES.map(([stage, title]) => html`<tr key=${stage}><th scope="row">${title}</th>${of.map(({ stages }) => {
      const found = stages[stage];
      return html`<td>${number(found?.number ?? 0)}</td><td>${within(found, found?.p50_s)}</td><td>${within(found, found?.p95_s)}</td>`;
    })}</tr>`)}<//>`;

const Redis = ({ of }) => html`<h2>Redis</h2><${Facts} of=${{
  Version: of.version,
  Role: of.role,
  "Append-only file": of.aof_enabled ? (of.aof_healthy ? "✓ written" : "✕ its last write failed") : "✕ none",
  "Survives a crash of its host": of.durability,
  "When it is full": of.maxmemory_policy,
  "Memory, MB": `${megabytes(of.used_bytes)}${of.max_bytes ? ` of ${megabytes(of.max_bytes)}` : ", without a bound"}`,
  "Servers that hold state": of.masters,
  "Copies of each": of.replicas,
}} />`;

export const Health = () => {
  const { value: ready, error } = usePolling(() => read("v2/health/ready"), 2, []);
  const { value: found, error: refused } = usePolling(() => read("replicas"), 2, []);
  return html`<h1>Health</h1><${Failure} of=${error} />
    ${ready && html`<${Ready} of=${ready} />${ready.failing.map(
      ({ task, error: kind, seconds }) => html`<p class="failure">${task} fails in the background for ${seconds} s: ${kind}</p>`)}`}
    <${Failure} of=${refused} />
    ${found && html`<${Replicas} of=${found.replicas} /><${Latency} of=${found.replicas} /><${Redis} of=${found.redis} />`}`;
};
