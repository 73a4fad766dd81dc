// Images and open questions of a client, to be labelled by hand; what was answered is shown once the label is told.

import { change, read } from "./api.js";
import { Failure, number, Question, Table, usePolling } from "./parts.js";
import { html, useState } from "./vendor/preact-htm.js";

const SHOWN = 24;

// What the service does not do, as it is set up, is no failure: it is said.
const unless = (ask, ...codes) => ask().catch((error) => {
  if (codes.includes(error.code)) return { off: error.message };
  throw error;
});

const keyOf = ({ request_id, row }) => `${request_id} ${row}`;

const Picture = ({ of }) => of.png
  ? html`<img src=${`data:image/png;base64,${of.png}`} alt=${`Image ${of.row} of request ${of.request_id}`} />`
  : html`<span>No picture: image ${of.row} of request ${of.request_id}</span>`;

const Image = ({ of, onLabel }) => html`<figure class="image ${of.asked ? "asked" : ""}"><${Picture} of=${of} />
  <figcaption>${of.label ? `${of.label}; answered ${of.predicted}` : html`${of.asked ? "asked " : ""}<button onClick=${() => onLabel(of)}
    aria-label=${`Label image ${of.row} of request ${of.request_id}`}>Label</button>`}</figcaption></figure>`;

export const Label = ({ path, classes, told }) => {
  const [wanted, setWanted] = useState();
  const [times, setTimes] = useState(0);
  const [all, setAll] = useState(false);
  const { value: open, error } = usePolling(() => unless(() => read(`${path}/asks`), "guard_off"), 5, [path, times]);
  const { value: kept, error: unseen } = usePolling(() => unless(() => read(`${path}/images`), "images_off", "guard_off"), 5, [path, times]);
  if (!open || !kept) return html`<${Failure} of=${error ?? unseen} />`;
  if (open.off) return null;
  const images = [...(kept.images ?? [])].sort((one, other) => other.asked - one.asked);
  const pictured = new Set(images.map(keyOf));
  const questions = open.asks.flatMap(({ request_id, rows, expires_in_rows }) => rows.map((row) => ({ request_id, row, expires_in_rows })))
    .filter((each) => !pictured.has(keyOf(each)));
  const tell = async (form) => {
    const label = form.get("label");
    const reply = await (await change("POST", `${path}/feedback`, { rows: [{ request_id: wanted.request_id, row: wanted.row, label }] })).json();
    if (reply.feedback.counted) told(`Label of image ${wanted.row}: counted as ${label}.`);
    else told(`Label of image ${wanted.row}: not counted, ${Object.entries(reply.feedback).find(([, number]) => number)?.[0]}.`);
    setWanted(undefined);
    setTimes(times + 1);
  };
  return html`<section><h2>Label by hand</h2>
    <p>Those that are asked for tell most. What was answered is shown once a label is told, so that it is told without knowing.
      ${" "}${kept.off && "Pictures are shown where ACCLIMATE_KEEP_IMAGES_BYTES allows it."}</p>
    ${images.length > 0 && html`<div class="images">${images.slice(0, all ? undefined : SHOWN).map((each) => html`<${Image} key=${keyOf(each)} of=${each} onLabel=${setWanted} />`)}</div>`}
    ${images.length > SHOWN && html`<button onClick=${() => setAll(!all)}>${all ? "Fewer images" : `All ${images.length} images`}</button>`}
    ${questions.length > 0 && html`<${Table} name="Open questions" head=${["Request", "Image", "Expires after", "Label"]}>
      ${questions.map((each) => html`<tr key=${keyOf(each)}><th scope="row">${each.request_id}</th><td>${each.row}</td>
        <td>${number(each.expires_in_rows)} images</td><td><button onClick=${() => setWanted(each)}
          aria-label=${`Label image ${each.row} of request ${each.request_id}`}>Label</button></td></tr>`)}<//>`}
    ${!images.length && !questions.length && html`<p>Nothing is asked, and there are no images.</p>`}
    ${wanted && html`<${Question} title="What is it?" yes="Tell" onYes=${tell} onNo=${() => setWanted(undefined)}>
      ${wanted.png ? html`<${Picture} of=${wanted} />` : html`<p>Image ${wanted.row} of request ${wanted.request_id}</p>`}
      <label>Class <select name="label" required><option value="">choose</option>${classes.map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      <p>A label counts once and is not taken back.</p><//>`}</section>`;
};
