// What several pages are made of.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";

export const VERDICTS = { trusted: "✓ trusted", undecided: "– undecided", harmful: "✕ harmful" };
export const percent = (share, digits = 1) => (share == null ? "–" : `${(100 * share).toFixed(digits)} %`);
export const points = (gain) => (gain == null ? "–" : `${gain > 0 ? "+" : ""}${(100 * gain).toFixed(1)}`);
export const number = (value) =>
  value == null ? "–" : Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
export const time = (at) => (at ? new Date(at).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }) : "–");

export const Verdict = ({ of }) => html`<span class="verdict ${of ?? ""}">${VERDICTS[of] ?? "–"}</span>`;

// Asks now and every so many seconds; what there is stays until there is news, so that nothing flickers.
export const usePolling = (ask, seconds, watched) => {
  const [found, setFound] = useState({});
  useEffect(() => {
    let gone = false, timer;
    const look = async () => {
      const news = await ask().then((value) => ({ value }), (error) => ({ error }));
      if (gone) return;
      setFound((before) => ({ ...before, error: undefined, ...news }));
      timer = setTimeout(look, 1000 * seconds);
    };
    look();
    return () => { gone = true; clearTimeout(timer); };
  }, watched);
  return found;
};

// A choice of one of several; nothing to choose where there is one.
export const Choice = ({ label, value, of, said = (each) => each, none, onChoose }) => html`<label>${label}
  <select value=${value} onChange=${(event) => onChoose(event.target.value)}>
    ${none && html`<option value="">${none}</option>`}
    ${of.map((each) => html`<option key=${each} value=${each} selected=${each === value}>${said(each)}</option>`)}
  </select></label>`;

export const Facts = ({ of }) => html`<dl class="facts">${Object.entries(of).map(
  ([name, fact]) => html`<div key=${name}><dt>${name}</dt><dd>${fact}</dd></div>`)}</dl>`;

// A table that scrolls by itself, where a page would be too wide, or too long.
export const Table = ({ name, head, children, kind = "" }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${name}>
  <table class=${kind}><thead><tr>${head.map((title) => html`<th scope="col">${title}</th>`)}</tr></thead>
    <tbody>${children}</tbody></table></div>`;

export const Failure = ({ of }) => of && html`<p class="failure" role="alert">${of.message}</p>`;

// A question before something is done; the dialog keeps the focus, and Escape means no.
export const Question = ({ title, children, yes, onYes, onNo }) => {
  const dialog = useRef();
  const [failure, setFailure] = useState();
  const [busy, setBusy] = useState(false);
  useEffect(() => dialog.current.showModal(), []);
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    await onYes(new FormData(event.target)).catch(setFailure);
    setBusy(false);
  };
  return html`<dialog ref=${dialog} onClose=${onNo} aria-labelledby="question">
    <form onSubmit=${submit}>
      <h2 id="question">${title}</h2>
      ${children}
      <${Failure} of=${failure} />
      <div class="buttons">
        <button type="button" onClick=${() => dialog.current.close()}>Cancel</button>
        <button class="do" disabled=${busy}>${yes}</button>
      </div>
    </form>
  </dialog>`;
};
