// Functions that the scripts of all pages share.

export const byId = (id) => document.getElementById(id);

/** Creates an element. Names that are not writable properties, such as `aria-label` and `list`, become attributes. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) if (name in node && name !== "list") node[name] = value; else node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Creates a button that calls `act(event)` when it is pressed, and submits no form. `properties` replace the defaults. */
export function makeButton(textContent, act, properties = {}) {
  const button = make("button", { type: "button", className: "quiet", textContent, ...properties });
  button.addEventListener("click", act);
  return button;
}

/** Creates an element of SVG. */
export function makeSvg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Difference between the server's clock when the page was rendered and this machine's clock when the page was loaded, in milliseconds. */
const skew = Date.parse(document.documentElement.dataset.now) - Date.now() || 0;

/** The server's time, in milliseconds, for ages and remaining times. */
export const serverNow = () => Date.now() + skew;

/** Sets a text only if it differs, so that a live value does not disturb a selection or the layout. */
export function setText(node, value) {
  if (node && node.textContent !== value) node.textContent = value;
}

/** Sets a message for a person. Parts between backticks are code. */
export function setMessage(node, message) {
  node?.replaceChildren(...message.split("`").map((part, i) => (i % 2 ? make("code", { textContent: part }) : part)));
}

/** Sets a short note, with the whole text as its tooltip. */
export function setNote(node, value) {
  setText(node, value);
  if (node && node.title !== value) node.title = value;
}

/** An error status from the server, with the server's message. */
export class Problem extends Error {
  constructor(status, body) {
    super(body?.detail || body?.title || `The server responded with status ${status}.`);
    this.status = status;
    this.errors = body?.errors ?? [];
  }
}

/** A request without a complete response. */
export class Unreachable extends Error {}

/** Opens the sign-in page, which returns to this page afterwards. */
export function signIn() {
  location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
}

/** Time for which connections are suspect after a silence of the server, because they may be lost without the browser's knowledge. */
const SUSPECT_MS = 60_000;
/** Time after which a request is first repeated while connections are suspect. */
const FIRST_WAIT_MS = 4000;
let suspectUntil = 0, suspicion = new AbortController();

/** Called when the server was silent for too long, so that pending requests may never get a response. */
export function suspectConnections() {
  suspectUntil = performance.now() + SUSPECT_MS;
  suspicion.abort();
  suspicion = new AbortController();
}

/**
 * Like `fetch`, for requests that may be repeated. Requests that were sent before connections became suspect are repeated. While
 * connections are suspect, a request without a response is sent again. Returns `readBody(response)`: the body may also fail to arrive.
 * Throws an Unreachable if the server is unreachable or the request is aborted.
 */
export async function get(path, options = {}, readBody = (response) => response) {
  for (let wait = FIRST_WAIT_MS; ;) {
    const isSuspect = performance.now() < suspectUntil, giveUp = isSuspect ? AbortSignal.timeout(wait) : suspicion.signal;
    try {
      return await readBody(await fetch(path, { ...options, signal: options.signal ? AbortSignal.any([options.signal, giveUp]) : giveUp }));
    } catch (error) { if (!giveUp.aborted || options.signal?.aborted) throw new Unreachable(error.message); }
    if (isSuspect) wait *= 2;
  }
}

/** Returns a page as the server renders it now; null if the server cannot render it, or asks the reader to sign in first. */
export async function fetchPage(path) {
  const [response, html] = await get(path, { headers: { accept: "text/html" } }, async (response) => [response, await response.text()]);
  if (response.redirected) signIn();
  return response.ok && !response.redirected ? new DOMParser().parseFromString(html, "text/html") : null;
}

/**
 * Returns JSON from the server. `body`: an object, or a Blob or FormData, which is sent unchanged. Throws a Problem for an error status,
 * and an Unreachable if the server is unreachable or the request is aborted.
 */
export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  const isBlob = body instanceof Blob, isForm = body instanceof FormData;
  const request = {
    method, signal,
    headers: { accept: "application/json", ...(body === undefined || isForm ? {} : { "content-type": isBlob ? "application/octet-stream" : "application/json" }), ...headers },
    body: body === undefined || isBlob || isForm ? body : JSON.stringify(body),
  };
  const readBody = async (response) => [response, /json/.test(response.headers.get("content-type") ?? "") ? await response.json() : null];
  const [response, content] = method === "GET" ? await get(path, request, readBody) : await fetch(path, request).then(readBody).catch((error) => { throw new Unreachable(error.message); });
  if (response.status === 401) signIn();
  if (!response.ok) throw new Problem(response.status, content);
  return content;
}

/** Resolves after the next frame. On a hidden page, which has no frames, resolves after a short time. */
export const nextFrame = () => new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); setTimeout(done, 200); });

/** Announces a text to a screen reader, unless only numbers such as seconds and counts have changed. */
export function announce(node, text) {
  const steady = text.replace(/\d[\d:,.]*/g, "");
  if (node.dataset.steady === steady) return;
  node.dataset.steady = steady;
  node.textContent = text;
}

/**
 * Returns a function that shows the current activity and its progress in the elements with these ids. A screen reader announces only the
 * activity, and not every second or count.
 */
export const activityIn = (id, progressId) => (activity, progress = "") => { setText(byId(id), activity); setText(byId(progressId), progress); };

/** Whether a request has failed. Other errors are errors of a script. */
export const isFailedRequest = (error) => error instanceof Problem || error instanceof Unreachable;

/** Returns a text about an error. For a failed request: the details of all mistakes, or the problem's message. */
export function errorText(error) {
  if (error instanceof Problem) return error.errors.length ? error.errors.map((e) => e.detail).join(" ") : error.message;
  if (error instanceof Unreachable) return navigator.onLine ? "The server does not answer. It may be restarting: try again in a moment." : "No connection. Try again when this machine is online.";
  console.error(error);
  return `This page's script has failed: ${error.message}. Reload the page; if the script fails again, report this message.`;
}

/** Like `errorText`, but each mistake names the key of its setting, for places without a field beside the mistake. */
export function errorTexts(error) {
  if (!(error instanceof Problem) || !error.errors.length) return errorText(error);
  return error.errors.map(({ pointer = "", detail }) => `${pointer ? `${pointer.slice(1).replaceAll("/", ".")}: ` : ""}${detail}`).join("\n");
}

/** Shows `live`, `reconnecting`, `40 s behind`, `deleted` or `stopped`. Screen readers announce the kind of status, and not every second. */
export function showLive(status) {
  const node = byId("live"), kind = status === "reconnecting" ? "away" : status.endsWith("behind") ? "behind" : status;
  node.hidden = false;
  setText(node, status);
  if (node.dataset.status === kind) return;
  node.dataset.status = kind;
  setText(byId("live-status"), kind === "behind" ? "behind, catching up" : status);
}

/** Opens the dialog with the button `NAME-yes`. The button calls `act`, then closes the dialog or shows the text `describe(error)`. */
export function openForm(name, act, describe = errorText) {
  const button = byId(`${name}-yes`), error = byId(`${name}-error`), dialog = button.closest("dialog");
  setText(error, "");
  button.onclick = async (event) => {
    event.preventDefault();
    button.disabled = true;
    try { await act(); dialog.close("yes"); } catch (e) { setMessage(error, describe(e)); } finally { button.disabled = false; }
  };
  dialog.showModal();
}

/** Asks for confirmation before something is lost. */
export function confirmThen({ title, detail, yes, act }) {
  setText(byId("confirm-title"), title);
  setText(byId("confirm-text"), detail);
  setText(byId("confirm-yes"), yes);
  byId("confirm-yes").hidden = false;
  openForm("confirm", act);
}

/** Copies a text, and says so on the button. */
export async function copy(value, button) {
  try {
    await navigator.clipboard.writeText(value);
  } catch {
    // Without a secure context the clipboard is not available. The text is selected instead, to be copied by a keyboard shortcut.
    const target = button.parentElement.querySelector("code, pre, textarea");
    if (target) getSelection().selectAllChildren(target);
    return setText(button, "Selected");
  }
  const label = button.dataset.label ??= button.textContent;
  setText(button, "Copied");
  setTimeout(() => setText(button, label), 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-copy], [data-copy-from]");
  if (button) copy(button.dataset.copy ?? byId(button.dataset.copyFrom).textContent, button);
});

/** Marks one button of a group as pressed, and all others as not pressed. */
export function markPressed(group, chosen) {
  for (const button of group) button.setAttribute("aria-pressed", String(button === chosen));
}

/** Closes a menu (`details`) after a click beside it, and on Escape. `signal`: removes the listeners when it is aborted. */
export function makeClosable(menu, signal) {
  document.addEventListener("click", (event) => { if (!event.composedPath().includes(menu)) menu.open = false; }, { signal });
  menu.addEventListener("keydown", (event) => { if (event.key === "Escape") { menu.open = false; menu.querySelector("summary").focus(); } });
}

/** Opens a dialog with a title, `content`, `links` and a button that closes it. */
export function openDialog(id, title, content, ...links) {
  const close = makeButton("Close", () => dialog.close(), { className: "" });
  const dialog = make("dialog", { id, "aria-labelledby": `${id}-title` }, make("h2", { id: `${id}-title`, textContent: title }), ...content, make("div", { className: "actions" }, ...links, close));
  byId(id)?.remove();
  document.body.append(dialog);
  dialog.showModal();
}

/** Returns a value that the browser stores; null without a value, or if the browser refuses access to its storage. */
export const readStored = (key) => { try { return localStorage.getItem(key); } catch { return null; } };

/** Parses a JSON list that the browser or a URL has kept; empty for any other text. */
export const parseList = (text) => { try { const list = JSON.parse(text); return Array.isArray(list) ? list : []; } catch { return []; } };

/** Stores a value, or removes it for null. Returns whether the browser allows this. */
export function store(key, value) {
  try { if (value === null) localStorage.removeItem(key); else localStorage.setItem(key, value); return true; } catch { return false; }
}

/** Whether the reader wants notifications and the browser allows them. */
export const isNotifying = () => "Notification" in window && readStored("notify") === "yes" && Notification.permission === "granted";

/** Shows a notification that a job has ended, if the reader has asked for notifications and the page is hidden. */
export function notify(title, body, path) {
  if (!isNotifying() || !document.hidden) return;
  const note = new Notification(title, { body, tag: path, icon: "/static/icon.svg" });
  note.onclick = () => { focus(); if (location.pathname !== path) location.href = path; };
}
