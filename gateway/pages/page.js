"use strict";

// Shared by both pages: sending requests with the key, showing errors, making elements. Text is added to a page as
// text nodes only, never as markup.

const KEY = "hedgerow.key"; // in sessionStorage, which ends with the tab

const byId = (id) => document.getElementById(id);

/** An error that the server answered, with its message. */
class Refusal extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

/** The answer to a GET, or to a POST of `body` as JSON. Throws Refusal, or TypeError if nothing answers. */
async function ask(path, body, headers = {}) {
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(path, {
    method: body === undefined ? "GET" : "POST",
    headers,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
  });
  if (answer.ok) return answer;
  let error = {};
  try {
    error = (await answer.json()).error ?? {};
  } catch {
    // Something between this page and the server answered, in a form of its own: only its status is known.
  }
  throw new Refusal(
    error.message ?? `The answer was ${answer.status} ${answer.statusText}.`,
    error.code,
    answer.status,
  );
}

let isKeyAskedFor = false; // since the key last changed: a field that the user has closed stays closed

/** Show what went wrong in an element with role="alert"; a refused key opens the field for it, once. */
function showError(place, error) {
  const text = error instanceof Refusal ? error.message : "The server does not answer. Is it running?";
  const shown = make("p", {}, text, error.code ? " " : "", error.code ? make("code", {}, error.code) : "");
  if (place.textContent !== shown.textContent) place.replaceChildren(...shown.childNodes); // a screen reader reads each change
  if (error.status === 401 && !isKeyAskedFor) isKeyAskedFor = byId("key").open = true;
}

/** An element with attributes, and children that are elements or text. */
function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  element.append(...children);
  return element;
}

/** An SVG element. */
function draw(name, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  element.append(...children);
  return element;
}

/** A command for a POSIX shell that asks this host the same. The key itself is never written into it. */
function curlOf(method, path, body, withKey = Boolean(sessionStorage.getItem(KEY))) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = [
    `curl -s ${method === "GET" || body !== undefined ? "" : `-X ${method} `}${quote(location.origin + path)}`,
  ];
  if (withKey) parts.push('-H "Authorization: Bearer $HEDGEROW_API_KEY"');
  if (body !== undefined) parts.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(body))}`);
  return parts.join(" \\\n  ");
}

/** A command in a box, with a button that copies it. */
function shell(command) {
  const code = make("code", {}, command);
  const button = make("button", { type: "button", class: "plain small" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
    } catch {
      // A page of a host without TLS has no clipboard; the user can copy the selection.
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return make("div", { class: "shell" }, make("pre", {}, code), button);
}

/** Let the field in the bar hold the key; `onChange` is called when there is another. */
function wireKey(onChange) {
  const details = byId("key");
  const form = details.querySelector("form");
  const field = form.querySelector("input");
  const set = (key) => {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
    field.value = "";
    details.open = isKeyAskedFor = false;
    details.querySelector("summary").textContent = key ? "API key is set" : "API key";
    onChange();
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    set(field.value.trim());
  });
  form.querySelector("[data-forget]").addEventListener("click", () => set(""));
  if (sessionStorage.getItem(KEY)) details.querySelector("summary").textContent = "API key is set";
}
