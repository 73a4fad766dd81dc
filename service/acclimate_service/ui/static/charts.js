// Numbers over time as lines with what befell the client, and the same as a table.

import { number, percent, Table, time } from "./parts.js";
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

// Okabe and Ito's colours, told apart by colour-blind people, and dashes for those who see none.
const LINES = [["#0072b2", []], ["#d55e00", [8, 4]], ["#009e73", [2, 3]], ["#cc79a7", [8, 3, 2, 3]]];
const HEIGHT = 190;
const MINOR = ["labels", "skipped"]; // too many to be named

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const words = (name) => name.replaceAll("_", " ");
const when = (point) => new Date(point.at) / 1000;

// What befell the client by a point, and what its labels turned to there.
const marksOf = (points) => {
  let verdict;
  return points.map((point) => {
    const before = verdict;
    verdict = point.verdict || before; // of events, there is none
    return [...Object.keys(point.events), ...(before && verdict !== before ? [verdict] : [])];
  });
};

// Where the frozen model answered: from one point to the next that it did not.
const bandsOf = (points) => {
  const bands = [];
  let frozen = 0;
  for (const point of points) {
    const before = frozen;
    frozen = point.signals.frozen ?? before; // of events, there is none
    if (frozen >= 0.5 && before < 0.5) bands.push([when(point), when(points.at(-1))]);
    if (frozen < 0.5 && before >= 0.5) bands.at(-1)[1] = when(point);
  }
  return bands;
};

const draw = (plot, { marks, bands }) => {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px sans-serif`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  const at = (seconds) => Math.min(Math.max(plot.valToPos(seconds, "x", true), bbox.left), bbox.left + bbox.width);
  for (const [from, until] of bands) {
    ctx.globalAlpha = 0.18;
    ctx.fillStyle = style("--quiet");
    ctx.fillRect(at(from), bbox.top, Math.max(2, at(until) - at(from)), bbox.height);
  }
  ctx.globalAlpha = 1;
  ctx.strokeStyle = ctx.fillStyle = style("--quiet");
  ctx.setLineDash([3, 3]);
  for (const [seconds, name] of marks) {
    const x = plot.valToPos(seconds, "x", true), wide = ctx.measureText(name).width + 6;
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    const minor = MINOR.includes(name);
    ctx.beginPath();
    ctx.moveTo(x, minor ? bbox.top + 0.9 * bbox.height : bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!minor) ctx.fillText(name, x + wide > bbox.left + bbox.width ? x - wide + 3 : x + 3, bbox.top);
  }
  ctx.restore();
};

const options = (title, names, width, drawn) => ({
  title,
  width,
  height: HEIGHT,
  cursor: { sync: { key: "time" } },
  scales: { x: { time: true } },
  axes: [0, 1].map(() => ({ stroke: style("--text"), grid: { stroke: style("--line") }, ticks: { stroke: style("--line") } })),
  series: [
    {},
    ...names.map((name, i) => ({
      label: words(name),
      stroke: LINES[i % LINES.length][0],
      dash: LINES[i % LINES.length][1],
      width: 2,
      spanGaps: true,
      value: (_, value) => number(value),
    })),
  ],
  hooks: { drawClear: [(plot) => draw(plot, drawn.current)] },
});

const Numbers = ({ title, names, of, marks }) => {
  const frozen = of.some((point) => point.signals.frozen != null);
  return html`<${Table} name=${`${title}, numbers`}
    head=${["Time", "Version", "Batches", ...names.map(words), ...(frozen ? ["answered by the frozen model"] : []), "Events"]}>
    ${of.map((point, i) => html`<tr key=${point.version}><th scope="row">${time(point.at)}</th><td>${point.version}</td>
      <td>${point.batches}</td>${names.map((name) => html`<td>${number(point.signals[name])}</td>`)}
      ${frozen && html`<td>${percent(point.signals.frozen, 0)}</td>`}<td>${marks[i].join(", ")}</td></tr>`).reverse()}<//>`;
};

export const Chart = ({ title, names, of }) => {
  const place = useRef(), plot = useRef(), drawn = useRef({ marks: [], bands: [] });
  const [open, setOpen] = useState(false);
  const there = names.filter((name) => of.some((point) => point.signals[name] != null));
  const data = [of.map(when), ...there.map((name) => of.map((point) => point.signals[name] ?? null))];
  const marks = marksOf(of), bands = bandsOf(of);
  drawn.current = { marks: of.flatMap((point, i) => (marks[i].length ? [[when(point), marks[i].join(", ")]] : [])), bands };
  useEffect(() => {
    if (!there.length) return undefined;
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(title, there, place.current.clientWidth, drawn), plot.current?.data ?? data, place.current);
    };
    make();
    const resized = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    const dark = matchMedia("(prefers-color-scheme: dark)");
    resized.observe(place.current);
    dark.addEventListener("change", make);
    return () => { dark.removeEventListener("change", make); resized.disconnect(); plot.current.destroy(); plot.current = undefined; };
  }, [there.join()]);
  useEffect(() => plot.current?.setData(data), [of]);
  const latest = there.map((name) => `${words(name)} ${number(of.findLast((point) => point.signals[name] != null).signals[name])}`);
  return there.length
    ? html`<figure class="chart"><div ref=${place} aria-hidden="true"></div>
        <figcaption>Now: ${latest.join(", ")}.${bands.length ? " Grey: the frozen model answered." : ""}</figcaption>
        <details open=${open} onToggle=${(event) => setOpen(event.target.open)}><summary>${title}: numbers</summary>
          ${open && html`<${Numbers} title=${title} names=${there} of=${of} marks=${marks} />`}</details></figure>`
    : null;
};

// How far each module has moved, as a table whose cells are shaded.
export const Modules = ({ of }) => {
  const measured = of.filter((point) => point.modules).slice(-12);
  if (!measured.length) return null;
  const most = Math.max(...measured.flatMap((point) => Object.values(point.modules)), 1e-12);
  return html`<section><h2>Size of the adaptation</h2>
    <p>Root mean square of each module’s change, relative to its weights; the darker, the larger.</p>
    <${Table} name="Size of the adaptation" kind="heat" head=${["Module", ...measured.map((point) => `v${point.version}`)]}>
      ${Object.keys(measured.at(-1).modules).map(
        (name) => html`<tr key=${name}><th scope="row">${name}</th>${measured.map(
          ({ modules }) => html`<${Shaded} value=${modules[name]} most=${most} />`)}</tr>`)}<//></section>`;
};

// A cell, shaded by the size of its number.
export const Shaded = ({ value, most }) =>
  html`<td style=${{ "--shade": `${Math.round(50 * Math.sqrt(Math.abs(value ?? 0) / most))}%` }}>${number(value)}</td>`;
