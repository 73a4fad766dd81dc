// Which page is shown, by the hash of the address, so that each can be linked to; and the key, where one is needed.

import { read, Refused, setKey } from "./api.js";
import { Client } from "./client.js";
import { Fleet } from "./fleet.js";
import { Health } from "./health.js";
import { Models } from "./models.js";
import { Failure } from "./parts.js";
import { html, render, useEffect, useState } from "./vendor/preact-htm.js";

const PAGES = [["", "Clients"], ["models", "Models"], ["health", "Health"]];

const placeOf = (hash) => {
  const [path, query] = hash.replace(/^#\/?/, "").split("?");
  return { path, query: Object.fromEntries(new URLSearchParams(query)) };
};

const go = (path, query) => {
  const said = new URLSearchParams(Object.entries(query).filter(([, value]) => value));
  const hash = `#/${path}${said.size ? `?${said}` : ""}`;
  if (placeOf(location.hash).path === path) history.replaceState(null, "", hash);
  else location.hash = hash;
  dispatchEvent(new HashChangeEvent("hashchange"));
};

const KeyForm = ({ again, failure }) => {
  const submit = (event) => {
    event.preventDefault();
    setKey(new FormData(event.target).get("key").trim());
    again();
  };
  return html`<main><h1>Acclimate</h1><form class="key" onSubmit=${submit}>
    <p>This service asks for a key. It is kept in this tab alone, until the tab is closed.</p>
    <label>API key <input type="password" name="key" autocomplete="off" required /></label>
    ${failure && html`<p class="failure" role="alert">${failure}</p>`}
    <button>Show the clients</button></form></main>`;
};

const App = () => {
  const [place, setPlace] = useState(placeOf(location.hash));
  const [access, setAccess] = useState({});
  useEffect(() => {
    const moved = () => setPlace(placeOf(location.hash));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const look = () =>
    read("models").then(
      ({ models }) => setAccess({ models }),
      (error) => setAccess(error instanceof Refused && error.status === 401 ? { failure: sessionStorage.length ? error.message : "" } : { error }),
    );
  useEffect(() => { look(); }, []);
  useEffect(() => {
    const again = access.error && setTimeout(look, 2000);
    return () => clearTimeout(again);
  }, [access]);
  const [, client] = place.path.match(/^clients\/(.+)$/) ?? [];
  const [at, named] = client ? [""] : place.path.split("/");
  useEffect(() => {
    const title = client ? decodeURIComponent(client) : (PAGES.find(([path]) => path === at)?.[1] ?? "Clients");
    document.title = `${title} – Acclimate`;
  }, [place.path]);
  const { models, failure, error } = access;
  if (!models) return failure != null ? html`<${KeyForm} again=${look} failure=${failure} />` : error ? html`<main><h1>Acclimate</h1><${Failure} of=${error} /></main>` : null;
  const model = models.find(({ name, default: first }) => name === place.query.model && !first);
  return html`<a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.querySelector("main").focus(); }}>To the page</a>
    <header><strong>Acclimate</strong><nav aria-label="Pages">${PAGES.map(
      ([path, title]) => html`<a key=${path} href=${`#/${path}`} aria-current=${path === at ? "page" : null}>${title}</a>`)}</nav></header>
    <main id="main" tabindex="-1">${client
      ? html`<${Client} key=${place.path + model?.name} model=${model ?? models[0]} of=${model?.name} id=${decodeURIComponent(client)} go=${go} />`
      : at === "models" ? html`<${Models} models=${models} name=${named} go=${go} />`
      : at === "health" ? html`<${Health} />`
      : html`<${Fleet} key=${model?.name} models=${models} of=${model?.name} query=${place.query} go=${go} />`}</main>`;
};

render(html`<${App} />`, document.body);
