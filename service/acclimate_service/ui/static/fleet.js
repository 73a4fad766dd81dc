// All clients: searched, filtered, sorted, and only those on the screen drawn.

import { eachPage } from "./api.js";
import { Choice, Failure, percent, points, time, Verdict, VERDICTS } from "./parts.js";
import { html, useEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";

const ROW = 40; // pixels, as in style.css
const BEYOND = 8; // rows drawn above and below the screen
const LOOK_S = 3;
const WHOLE_S = 60; // until it is looked who is gone

const COLUMNS = [
  ["client_id", "Client"],
  ["adapter", "Adapter"],
  ["adaptation", "Adaptation"],
  ["verdict", "Verdict"],
  ["gain", "Gain"],
  ["labelled", "Labels"],
  ["shift", "Drift"],
  ["agreement", "Agreement"],
  ["version", "Changes"],
  ["changed_at", "Last change"],
];

// Rows of a model by client, brought up to date; `whole` once all were seen.
const useClients = (model) => {
  const [found, setFound] = useState({ rows: new Map(), whole: false });
  useEffect(() => {
    const end = new AbortController();
    let since = 0, wholeAt = 0, timer;
    const look = async () => {
      const now = Date.now(), all = now - wholeAt > 1000 * WHOLE_S, seen = new Map();
      const query = all ? "" : `&active_since=${new Date(since - 5000).toISOString()}`;
      const take = (rows) => {
        for (const row of rows) seen.set(row.client_id, row);
        if (rows.length) setFound(({ rows: before, whole }) => ({ rows: new Map([...before, ...seen]), whole }));
      };
      try {
        await eachPage(model, query, take, end.signal);
        if (all) wholeAt = now;
        since = now;
        if (all) setFound({ rows: seen, whole: true });
      } catch (error) {
        setFound((before) => ({ ...before, error }));
      }
      if (!end.signal.aborted) timer = setTimeout(look, 1000 * LOOK_S);
    };
    look();
    return () => { end.abort(); clearTimeout(timer); };
  }, [model]);
  return found;
};

const compare = (by) => (one, other) => {
  const [a, b] = [one[by], other[by]];
  if (a == null || b == null) return (a == null) - (b == null);
  return typeof a === "number" ? a - b : a < b ? -1 : a > b ? 1 : 0;
};

export const Fleet = ({ models, of, query, go }) => {
  const { rows, whole, error } = useClients(of);
  const [scrolled, setScrolled] = useState({ top: 0, height: 800 });
  const view = useRef();
  const { q = "", adapter = "", verdict = "", sort = "client_id", down = "" } = query;
  useEffect(() => {
    const measure = () => setScrolled({ top: view.current.scrollTop, height: view.current.clientHeight });
    const watching = new ResizeObserver(measure);
    watching.observe(view.current);
    return () => watching.disconnect();
  }, []);
  const fitting = useMemo(() => {
    const wanted = q.toLowerCase();
    const found = [...rows.values()].filter(
      (row) =>
        (!wanted || row.client_id.toLowerCase().includes(wanted)) &&
        (!adapter || row.adapter === adapter) &&
        (!verdict || row.verdict === verdict),
    );
    found.sort(compare(sort));
    return down ? found.reverse() : found;
  }, [rows, q, adapter, verdict, sort, down]);
  const adapters = useMemo(() => [...new Set([...rows.values()].map((row) => row.adapter))].sort(), [rows]);
  const first = Math.max(0, Math.floor(scrolled.top / ROW) - BEYOND);
  const shown = fitting.slice(first, first + Math.ceil(scrolled.height / ROW) + 2 * BEYOND);
  const set = (change) => go("", { ...query, ...change });
  return html`<h1>Clients</h1>
    <form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
      ${models.length > 1 && html`<${Choice} label="Model" value=${of ?? models[0].name} of=${models.map(({ name }) => name)}
        onChoose=${(name) => go("", name === models[0].name ? {} : { model: name })} />`}
      <label>Search <input type="search" value=${q} onInput=${(event) => set({ q: event.target.value })} /></label>
      <${Choice} label="Adapter" value=${adapter} of=${adapters} none="any" onChoose=${(chosen) => set({ adapter: chosen })} />
      <${Choice} label="Verdict" value=${verdict} of=${Object.keys(VERDICTS)} said=${(each) => VERDICTS[each]} none="any"
        onChoose=${(chosen) => set({ verdict: chosen })} />
      <output>${fitting.length.toLocaleString("en")} of ${rows.size.toLocaleString("en")}${whole ? "" : " so far"}</output>
    </form>
    <${Failure} of=${error} />
    <div class="fleet" ref=${view} tabindex="0" role="region" aria-label="Table of clients"
      onScroll=${(event) => setScrolled({ top: event.target.scrollTop, height: event.target.clientHeight })}>
      <table aria-rowcount=${fitting.length + 1}>
        <thead><tr aria-rowindex="1">
          ${COLUMNS.map(
            ([name, title]) => html`<th scope="col" class=${name}
              aria-sort=${sort === name ? (down ? "descending" : "ascending") : "none"}>
              <button onClick=${() => set({ sort: name, down: sort === name && !down ? "1" : "" })}>${title}
                <span aria-hidden="true">${sort === name ? (down ? "▼" : "▲") : ""}</span></button></th>`,
          )}
        </tr></thead>
        <tbody>
          <tr class="room" aria-hidden="true" style=${{ height: `${first * ROW}px` }}></tr>
          ${shown.map(
            (row, place) => html`<tr key=${row.client_id} aria-rowindex=${first + place + 2}>
              <th scope="row" class="client_id" title=${row.client_id}><a href=${`#/clients/${encodeURIComponent(row.client_id)}${of ? `?model=${encodeURIComponent(of)}` : ""}`}>${row.client_id}</a></th>
              <td class="adapter">${row.adapter}</td>
              <td class="adaptation">${row.adaptation}</td>
              <td class="verdict"><${Verdict} of=${row.verdict} /></td>
              <td class="gain">${points(row.gain)}</td>
              <td class="labelled">${row.labelled ?? "–"}</td>
              <td class="shift">${percent(row.shift)}</td>
              <td class="agreement">${percent(row.agreement, 0)}</td>
              <td class="version">${row.version}</td>
              <td class="changed_at">${time(row.changed_at)}</td>
            </tr>`,
          )}
          <tr class="room" aria-hidden="true" style=${{ height: `${Math.max(0, fitting.length - first - shown.length) * ROW}px` }}></tr>
        </tbody>
      </table>
      ${whole && !rows.size && html`<p>No client has sent anything yet.</p>`}
    </div>`;
};
