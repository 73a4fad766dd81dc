// What the pages ask the service, with the key of this tab if there is one.

const KEY = "acclimate-key";

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

export class Refused extends Error {
  constructor(status, detail, code) {
    super(detail);
    this.status = status;
    this.code = code;
  }
}

const send = async (path, { headers, ...options } = {}) => {
  const key = sessionStorage.getItem(KEY);
  const all = { ...(key ? { Authorization: `Bearer ${key}` } : {}), ...headers };
  const reply = await fetch(path, { ...options, headers: all });
  if (reply.ok || (reply.status === 503 && path.endsWith("/ready"))) return reply;
  const problem = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, problem.detail || `${reply.status} ${reply.statusText}`, problem.code);
};

export const read = async (path) => (await send(path)).json();
export const readText = async (path) => (await send(path)).text();

export const change = (method, path, body) =>
  send(path, {
    method,
    headers: {
      ...(method === "DELETE" ? {} : { "Idempotency-Key": crypto.randomUUID?.() ?? String(Math.random()).slice(2) }),
      ...(body ? { "Content-Type": "application/json" } : {}),
    },
    ...(body ? { body: JSON.stringify(body) } : {}),
  });

// Where the clients of a model are found; those of the default model without its name.
export const clientsOf = (model) => `${model ? `models/${encodeURIComponent(model)}/` : ""}clients`;
export const pathOf = (model, client) => `${clientsOf(model)}/${encodeURIComponent(client)}`;

// All clients of a model, page by page; `each` is given the rows of every page as it comes.
export const eachPage = async (model, query, each, signal) => {
  let next = "";
  do {
    const limit = next ? 1000 : 100; // the first page soon, the others in few requests
    const cursor = next ? `&cursor=${encodeURIComponent(next)}` : "";
    const page = await read(`${clientsOf(model)}?limit=${limit}${cursor}${query}`);
    if (signal.aborted) return;
    each(page.clients);
    next = page.next;
  } while (next);
};

// Server-sent events of a client, by its path; an EventSource could not send the key.
export const watch = async (path, after, tell, signal) => {
  let last = after;
  while (!signal.aborted) {
    try {
      const headers = { "Last-Event-ID": String(last) };
      const reply = await send(`${path}/timeline/live`, { headers, signal });
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = "", part; !(part = await reader.read()).done; ) {
        const events = (rest + part.value).split("\n\n");
        rest = events.pop();
        for (const event of events) {
          const fields = Object.fromEntries(event.split("\n").map((line) => line.split(/: (.*)/s)));
          if (fields.event !== "point") continue;
          last = Number(fields.id);
          tell(JSON.parse(fields.data));
        }
      }
    } catch (error) {
      if (error instanceof Refused && error.status < 500 && error.status !== 429) return;
    }
    await new Promise((wake) => setTimeout(wake, 1000));
  }
};
