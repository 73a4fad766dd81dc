// Numbers over time as lines with what befell the client, and the same as a table.

import { number, time } from "./parts.js";
import uPlot from "./vendor/uplot.js";
import { html, useEffect, useRef } from "./vendor/preact-htm.js";

// Okabe and Ito's colours, told apart by colour-blind people, and dashes for those who see none.
const LINES = [["#0072b2", []], ["#d55e00", [8, 4]], ["#009e73", [2, 3]], ["#cc79a7", [8, 3, 2, 3]]];
const HEIGHT = 190;
const MINOR = ["labels", "skipped"]; // too many to be named

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);

const options = (title, names, width, events) => ({
  title,
  width,
  height: HEIGHT,
  cursor: { sync: { key: "time" } },
  scales: { x: { time: true } },
  axes: [0, 1].map(() => ({ stroke: style("--text"), grid: { stroke: style("--line") }, ticks: { stroke: style("--line") } })),
  series: [
    {},
    ...names.map((label, i) => ({
      label,
      stroke: LINES[i % LINES.length][0],
      dash: LINES[i % LINES.length][1],
      width: 2,
      spanGaps: true,
      value: (_, value) => number(value),
    })),
  ],
  hooks: {
    draw: [
      (plot) => {
        const { ctx, bbox } = plot;
        ctx.save();
        ctx.strokeStyle = ctx.fillStyle = style("--quiet");
        ctx.font = `${11 * devicePixelRatio}px sans-serif`;
        ctx.setLineDash([3, 3]);
        ctx.textBaseline = "top";
        ctx.textAlign = "left";
        for (const [at, name] of events.current) {
          const x = plot.valToPos(at, "x", true), wide = ctx.measureText(name).width + 6;
          if (x < bbox.left || x > bbox.left + bbox.width) continue;
          const minor = MINOR.includes(name);
          ctx.beginPath();
          ctx.moveTo(x, minor ? bbox.top + 0.9 * bbox.height : bbox.top);
          ctx.lineTo(x, bbox.top + bbox.height);
          ctx.stroke();
          if (!minor) ctx.fillText(name, x + wide > bbox.left + bbox.width ? x - wide + 3 : x + 3, bbox.top);
        }
        ctx.restore();
      },
    ],
  },
});

const named = (point) => Object.keys(point.events).join(", ");

export const Chart = ({ title, names, of }) => {
  const place = useRef(), plot = useRef(), events = useRef([]);
  const there = names.filter((name) => of.some((point) => point.signals[name] != null));
  const data = [
    of.map((point) => new Date(point.at) / 1000),
    ...there.map((name) => of.map((point) => point.signals[name] ?? null)),
  ];
  events.current = of.filter(named).map((point) => [new Date(point.at) / 1000, named(point)]);
  useEffect(() => {
    if (!there.length) return undefined;
    plot.current = new uPlot(options(title, there, place.current.clientWidth, events), data, place.current);
    const resized = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    resized.observe(place.current);
    return () => { resized.disconnect(); plot.current.destroy(); };
  }, [there.join()]);
  useEffect(() => plot.current?.setData(data), [of]);
  return there.length
    ? html`<figure class="chart"><div ref=${place} aria-hidden="true"></div>
        <details><summary>${title}: numbers</summary>
          <div class="scroll" tabindex="0" role="region" aria-label=${`${title}, numbers`}><table>
            <thead><tr><th scope="col">Time</th><th scope="col">Version</th><th scope="col">Batches</th>
              ${there.map((name) => html`<th scope="col">${name}</th>`)}<th scope="col">Events</th></tr></thead>
            <tbody>${[...of].reverse().map(
              (point) => html`<tr key=${point.version}><th scope="row">${time(point.at)}</th><td>${point.version}</td>
                <td>${point.batches}</td>
                ${there.map((name) => html`<td>${number(point.signals[name])}</td>`)}<td>${named(point)}</td></tr>`,
            )}</tbody>
          </table></div>
        </details></figure>`
    : null;
};

// How far each module has moved, as a table whose cells are shaded.
export const Modules = ({ of }) => {
  const measured = of.filter((point) => point.modules).slice(-12);
  if (!measured.length) return null;
  const names = Object.keys(measured.at(-1).modules);
  const most = Math.max(...measured.flatMap((point) => Object.values(point.modules)), 1e-12);
  return html`<section><h2>Size of the adaptation</h2>
    <p>Root mean square of each module’s change, relative to its weights.</p>
    <div class="scroll" tabindex="0" role="region" aria-label="Size of the adaptation"><table class="heat">
      <thead><tr><th scope="col">Module</th>${measured.map((point) => html`<th scope="col">v${point.version}</th>`)}</tr></thead>
      <tbody>${names.map(
        (name) => html`<tr key=${name}><th scope="row">${name}</th>${measured.map(({ modules }) => {
          const shade = Math.round(50 * Math.sqrt((modules[name] ?? 0) / most));
          return html`<td style=${{ "--shade": `${shade}%` }}>${number(modules[name])}</td>`;
        })}</tr>`,
      )}</tbody>
    </table></div></section>`;
};
