"use strict";

// The status page: shows the model and the load, and lets the user try requests.

const TICK_MS = 2000;
const WINDOW_MS = 10_000; // the time that rates and quantiles cover
const NUM_POINTS = 60; // in a chart: two minutes
const MAX_COMPARED = 12;
const NUM_SHOWN = 8; // values of a vector that are shown

// Routes that watch or explain the server: without this list, the requests of this page would count as load.
const WATCHING = new Set([
  "/",
  "/docs",
  "/openapi.json",
  "/health",
  "/ready",
  "/info",
  "/metrics",
  "/v1/models",
  "/v1/models/{id}",
  "unknown",
  "none",
]);

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** A number in three digits or so. */
function short(value) {
  if (value === null) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  return value >= 100 || Number.isInteger(value) ? grouped.format(value) : value.toFixed(value >= 10 ? 1 : 2);
}

const linesOf = (text) =>
  text
    .split("\n")
    .map((line) => line.trim())
    .filter(Boolean);

// --- the model ---

let model = null;
let isKnown = false; // /info has answered
let shownName = null; // the model that is shown and tried, if there are several; null: the first or only one

// The key (null: none) that each path refused: the page does not send it there again. /metrics may need no key from the
// server's own host.
const refused = new Map();
const isRefused = (path) => refused.get(path) === sessionStorage.getItem(KEY);

async function showInfo() {
  const info = await (await ask("/info", undefined, shownName === null ? {} : { "X-Model": shownName })).json();
  byId("info-error").replaceChildren();
  showNames(Object.keys(info.models ?? {}));
  isKnown = true;
  model = info.model;
  const tasks = model?.tasks ?? [];
  byId("embed").hidden = !tasks.includes("embed");
  byId("score").hidden = !tasks.includes("score");
  byId("nothing-to-try").hidden = model === null || tasks.includes("embed") || tasks.includes("score");
  byId("model-name").textContent = model?.name ?? "No model yet";
  document.title = model ? `${model.name} · Hedgerow` : "Hedgerow";
  if (model === null) {
    byId("facts").replaceChildren();
    return;
  }
  const facts = {
    Architecture: model.architecture,
    Tasks: tasks.join(", "),
    Dimensions: tasks.includes("embed") ? grouped.format(model.dimensions) : null,
    "Longest input": `${grouped.format(model.max_tokens)} tokens`,
    Pooling: tasks.includes("embed") ? model.pooling + (model.normalize ? ", normalised" : "") : null,
    Scores: tasks.includes("score") ? model.score_activation : null,
    "Runs on": `${model.device}, ${model.dtype}`,
    Attention: model.attention,
    Version: info.versions?.hedgerow,
    Fingerprint: model.fingerprint.slice(0, 12),
  };
  const known = Object.entries(facts).filter(([, value]) => value);
  byId("facts").replaceChildren(
    ...known.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))),
  );
  const select = byId("prompt");
  const chosen = model.default_prompt_name ?? "";
  select.replaceChildren(
    ...["", ...model.prompts].map((name) => new Option(name || "none", name, name === chosen, name === chosen)),
  );
  if (chosen) select.options[0].remove(); // "no prompt" cannot be chosen: the model declares a default prompt
  byId("prompt-row").hidden = model.prompts.length === 0;
}

/** Let one of several models be chosen. */
function showNames(names) {
  const select = byId("which");
  byId("which-row").hidden = names.length < 2;
  if (select.options.length !== names.length) select.replaceChildren(...names.map((name) => new Option(name, name)));
}

/** A body as it is asked of the model that is shown. */
const ofShown = (body) => (shownName === null ? body : { ...body, model: shownName });

function showState(state, text) {
  const place = byId("state");
  if (place.textContent !== text) place.textContent = text; // a screen reader reads it only when it changes
  place.dataset.state = state;
}

const STATES = { ready: "Ready", starting: "Starting", draining: "Stopping", unavailable: "Cannot serve" };

/** What /ready says, in a 503 too. */
async function readReady() {
  const answer = await fetch("/ready", { cache: "no-store" });
  return answer.json();
}

// --- live numbers ---

/** Samples of the Prometheus text: a Map from a name to [labels, value] of each series. */
function parseMetrics(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries(
      [...(found[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, value]),
    );
    if (!families.has(found[1])) families.set(found[1], []);
    families.get(found[1]).push([labels, found[3] === "+Inf" ? Infinity : Number(found[3])]);
  }
  return families;
}

/** What the page needs of them at one moment. */
function readSample(text, ready) {
  const families = parseMetrics(text);
  const total = (name, counts = () => true) =>
    (families.get(name) ?? []).reduce((sum, [labels, value]) => (counts(labels) ? sum + value : sum), 0);
  const works = (labels) => !WATCHING.has(labels.route);
  const buckets = new Map(); // upper bound in seconds → requests that took at most that
  for (const [labels, value] of families.get("hedgerow_request_seconds_bucket") ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    if (works(labels)) buckets.set(bound, (buckets.get(bound) ?? 0) + value);
  }
  return {
    atMs: performance.now(),
    requests: total("hedgerow_requests_total", works),
    tokens: total("hedgerow_input_tokens_total"),
    waitingTokens: total("hedgerow_queued_tokens"),
    waitingSequences: total("hedgerow_queued_sequences"),
    buckets,
    ready: ready.workers.ready,
    workers: ready.workers.total,
  };
}

/** A quantile in seconds of what came between two states of a histogram, by interpolation; null where nothing came. */
function quantile(share, before, after) {
  const bounds = [...after.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => Math.max(0, after.get(bound) - (before.get(bound) ?? 0)));
  const num = counts.at(-1) ?? 0;
  if (num === 0) return null;
  const index = counts.findIndex((count) => count >= share * num);
  const lower = index === 0 ? 0 : bounds[index - 1];
  if (bounds[index] === Infinity) return lower; // the value is above the last bound; by how much is not known
  const below = index === 0 ? 0 : counts[index - 1];
  return lower + (bounds[index] - lower) * ((share * num - below) / (counts[index] - below));
}

/** What a tile shows at this sample; the first of its values is the line that is filled. */
const TILES = [
  { title: "Requests a second", values: (now, then) => [rate(now, then, "requests")] },
  { title: "Tokens a second", values: (now, then) => [rate(now, then, "tokens")] },
  {
    title: "Latency",
    unit: "ms",
    names: ["p50", "p99"],
    values: (now, then) =>
      [0.5, 0.99].map((share) => {
        const seconds = then && quantile(share, then.buckets, now.buckets);
        return seconds === null ? null : seconds * 1000;
      }),
  },
  { title: "Waiting tokens", values: (now) => [now.waitingTokens] },
  { title: "Waiting sequences", values: (now) => [now.waitingSequences] },
  { title: "Workers ready", values: (now) => [now.ready], of: (now) => now.workers },
];

/** Per second since `then`; null without it. A count that fell began anew. */
function rate(now, then, name) {
  return then && Math.max(0, now[name] - then[name]) / ((now.atMs - then.atMs) / 1000);
}

const samples = []; // of the last WINDOW_MS, the newest last

function buildTiles() {
  for (const tile of TILES) {
    tile.points = [];
    tile.value = make("p", { class: "value" }, "–");
    tile.svg = draw("svg", { class: "chart", viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img" });
    tile.top = make("span");
    const scale = make("p", { class: "scale" }, make("span", {}, "2 min ago"), tile.top);
    byId("tiles").append(make("article", { class: "tile" }, make("h3", {}, tile.title), tile.value, tile.svg, scale));
  }
}

function showSample(now) {
  while (samples.length > 1 && samples[1].atMs <= now.atMs - WINDOW_MS) samples.shift();
  const then = samples[0] ?? null;
  samples.push(now);
  for (const tile of TILES) {
    const values = tile.values(now, then);
    tile.points.push(values);
    if (tile.points.length > NUM_POINTS) tile.points.shift();
    showTile(tile, values, now);
  }
}

function showTile(tile, values, now) {
  const shown = values.map((value, index) => {
    const of = tile.of ? ` of ${tile.of(now)}` : "";
    const name = tile.names ? ` ${tile.unit} ${tile.names[index]}` : of;
    return make(
      "span",
      index ? { class: "second" } : {},
      short(value),
      make("small", {}, value === null && !tile.names ? "" : name),
    );
  });
  tile.value.replaceChildren(...shown);
  const most = Math.max(...tile.points.flat().map((value) => value ?? 0), tile.of ? tile.of(now) : 0);
  const top = most || 1;
  const x = (index) => ((NUM_POINTS - tile.points.length + index) * 100) / (NUM_POINTS - 1);
  const y = (value) => 39 - (value / top) * 37;
  const paths = [draw("path", { class: "axis", d: "M0 39.5H100" })];
  for (let line = values.length - 1; line >= 0; line--) {
    let pen = "M"; // an unknown value leaves a gap
    let d = "";
    tile.points.forEach((point, index) => {
      if (point[line] === null) pen = "M";
      else {
        d += `${pen}${x(index).toFixed(2)} ${y(point[line]).toFixed(2)}`;
        pen = "L";
      }
    });
    if (line === 0 && values.length === 1 && d) {
      const first = tile.points.findIndex((point) => point[0] !== null);
      paths.push(draw("path", { class: "area", d: `${d}V39H${x(first).toFixed(2)}Z` }));
    }
    paths.push(draw("path", { class: line ? "second" : "first", d }));
  }
  tile.svg.replaceChildren(...paths);
  tile.svg.setAttribute(
    "aria-label",
    `${tile.title}: now ${tile.value.textContent}, at most ${short(most)} in two minutes`,
  );
  tile.top.textContent = most ? `max ${short(most)}` : "";
}

async function tick() {
  const key = sessionStorage.getItem(KEY);
  try {
    const ready = await readReady();
    const reason = ready.reason ? `. ${ready.reason}` : "";
    showState(
      ready.status,
      `${STATES[ready.status] ?? ready.status}, ${ready.workers.ready} of ${ready.workers.total} workers${reason}`,
    );
    if (!isRefused("/info") && (!isKnown || (shownName ?? ready.model) !== (model?.name ?? null))) await refreshInfo();
    if (isRefused("/metrics")) return;
    showSample(readSample(await (await ask("/metrics")).text(), ready));
    byId("live-error").replaceChildren();
  } catch (error) {
    if (error.status === 401) refused.set("/metrics", key);
    if (error instanceof Refusal) showError(byId("live-error"), error);
    else showState("unreachable", "The server does not answer");
  }
}

async function refreshInfo() {
  const key = sessionStorage.getItem(KEY);
  try {
    await showInfo();
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    if (error.status === 401) refused.set("/info", key);
    byId("model-name").textContent = error.status === 401 ? "This server asks for a key" : "Not known";
    showError(byId("info-error"), error);
  }
}

/** One tick after the other, and none while the page is hidden. */
async function keepTicking() {
  for (;;) {
    if (document.visibilityState === "visible") await tick();
    await new Promise((wake) => setTimeout(wake, TICK_MS));
  }
}

// --- trying requests ---

/** What the Server-Timing header says of an answer, by stage in milliseconds. */
function timingsOf(answer) {
  const header = answer.headers.get("Server-Timing") ?? "";
  return Object.fromEntries([...header.matchAll(/(\w+);dur=([\d.]+)/g)].map(([, stage, ms]) => [stage, Number(ms)]));
}

function measures(answer, ...others) {
  const timings = timingsOf(answer);
  const shown = [...others];
  if ("total" in timings) shown.push([`${timings.total.toFixed(2)} ms`, "in all"]);
  if (timings.step) shown.push([`${timings.step.toFixed(2)} ms`, "in the model"]);
  return make(
    "p",
    { class: "measures" },
    ...shown.map(([value, name]) => make("span", {}, make("b", {}, value), ` ${name}`)),
  );
}

function asCurl(path, body) {
  return make(
    "details",
    { class: "as-curl" },
    make("summary", {}, "The same in a shell"),
    shell(curlOf("POST", path, body)),
  );
}

/** Let a form ask and show: one request at a time, what was refused under its button. */
function wireForm(name, run) {
  const form = byId(`${name}-form`);
  const button = form.querySelector("button");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (button.disabled) return;
    button.disabled = true;
    byId(`${name}-error`).replaceChildren();
    try {
      byId(`${name}-outcome`).replaceChildren(...(await run()));
    } catch (error) {
      byId(`${name}-outcome`).replaceChildren();
      showError(byId(`${name}-error`), error);
    } finally {
      button.disabled = false;
    }
  });
}

/** All of a vector as one jagged line. */
function strip(vector) {
  const most = Math.max(...vector.map(Math.abs)) || 1;
  const d = vector.map((value, index) => {
    const x = ((index + 0.5) * 100) / vector.length;
    return `M${x.toFixed(3)} 20V${(20 - (value / most) * 19).toFixed(2)}`;
  });
  return draw(
    "svg",
    {
      class: "strip",
      viewBox: "0 0 100 40",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": "The whole vector",
    },
    draw("path", { class: "axis", d: "M0 20H100" }),
    draw("path", { d: d.join("") }),
  );
}

async function tryText() {
  const body = ofShown({ input: byId("text").value });
  const prompt = byId("prompt").value;
  if (!byId("prompt-row").hidden && prompt) body.prompt_name = prompt;
  const answer = await ask("/v1/embeddings", body);
  const {
    data: [{ embedding }],
    usage,
  } = await answer.json();
  const head = make(
    "ol",
    { class: "head mono", id: "vector-head", "aria-label": `The first ${NUM_SHOWN} values` },
    ...embedding.slice(0, NUM_SHOWN).map((value) => make("li", {}, String(value))),
  );
  return [
    measures(
      answer,
      [grouped.format(embedding.length), "dimensions"],
      [grouped.format(usage.total_tokens), usage.total_tokens === 1 ? "token" : "tokens"],
    ),
    head,
    strip(embedding),
    asCurl("/v1/embeddings", body),
  ];
}

function cosine(a, b) {
  let dot = 0,
    aa = 0,
    bb = 0;
  for (let index = 0; index < a.length; index++) {
    dot += a[index] * b[index];
    aa += a[index] * a[index];
    bb += b[index] * b[index];
  }
  return aa && bb ? dot / Math.sqrt(aa * bb) : 0;
}

async function compareSentences() {
  const lines = linesOf(byId("sentences").value);
  const input = lines.slice(0, MAX_COMPARED);
  const body = ofShown({ input });
  const answer = await ask("/v1/embeddings", body);
  const { data, usage } = await answer.json();
  const vectors = data.map(({ embedding }) => embedding);
  const columns = input.map((_, index) => make("th", { scope: "col" }, String(index + 1)));
  const rows = input.map((text, row) => {
    const cells = vectors.map((vector) => {
      const value = cosine(vectors[row], vector);
      const cell = make("td", {}, (Math.round(value * 100) / 100 + 0).toFixed(2));
      cell.style.setProperty("--share", Math.max(0, value).toFixed(3));
      return cell;
    });
    return make("tr", {}, make("th", { scope: "row", title: text }, `${row + 1}  ${text}`), ...cells);
  });
  const matrix = make(
    "table",
    { class: "matrix", id: "matrix" },
    make("thead", {}, make("tr", {}, make("td", { class: "corner" }), ...columns)),
    make("tbody", {}, ...rows),
  );
  matrix.querySelector(".corner").replaceWith(make("th", { "aria-label": "Sentence" }));
  const cut = lines.length - input.length;
  return [
    measures(answer, [grouped.format(usage.total_tokens), "tokens"]),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Similarities" }, matrix),
    ...(cut
      ? [make("p", { class: "hint" }, `Only the first ${MAX_COMPARED} are compared; ${cut} more were left out.`)]
      : []),
    asCurl("/v1/embeddings", body),
  ];
}

async function rerankDocuments() {
  const documents = linesOf(byId("documents").value);
  const body = ofShown({ query: byId("query").value, documents });
  const answer = await ask("/v1/rerank", body);
  const { results, usage } = await answer.json();
  const scores = results.map((result) => result.relevance_score);
  // Sigmoid scores have a fixed scale; the scale of logits is that of the scores shown.
  const [least, most] = scores.every((score) => score >= 0 && score <= 1)
    ? [0, 1]
    : [Math.min(...scores), Math.max(...scores)];
  const items = results.map((result) => {
    const length = make("span", { class: "length", "aria-hidden": "true" });
    length.style.setProperty("--share", ((result.relevance_score - least) / (most - least || 1)).toFixed(3));
    return make(
      "li",
      {},
      make("span", { class: "score" }, result.relevance_score.toFixed(4)),
      make("span", { class: "text" }, documents[result.index]),
      length,
    );
  });
  const tokens = usage?.total_tokens;
  return [
    measures(answer, ...(tokens === undefined ? [] : [[grouped.format(tokens), "tokens"]])),
    make("ol", { class: "ranking", id: "ranking", "aria-label": "Documents, the best first" }, ...items),
    asCurl("/v1/rerank", body),
  ];
}

wireForm("text", tryText);
wireForm("compare", compareSentences);
wireForm("rerank", rerankDocuments);
wireKey(() => {
  refused.clear();
  isKnown = false;
  refreshInfo().catch(() => {}); // nothing answers; the next tick shows that
});
byId("which").addEventListener("change", () => {
  shownName = byId("which").value;
  // The results of the other model do not apply to this one.
  for (const name of ["text", "compare", "rerank"]) byId(`${name}-outcome`).replaceChildren();
  refreshInfo().catch(() => {});
});
buildTiles();
keepTicking();
