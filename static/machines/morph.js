// Updates a part of the page to the server's new version, and changes only nodes that differ. The focus, the selection and the position of
// a screen reader stay.

import { isFailedRequest, fetchPage, showLive } from "../page.js";
import { Stream } from "../stream.js";

const REFRESH_INTERVAL_MS = 5000;

/**
 * Returns a function that requests the page again and calls `update(page)`. The function does nothing while its last call is running or the
 * page is hidden. After a failed request, the next call tries again.
 */
export function refresher(update) {
  let isRunning = false;
  return async () => {
    if (isRunning || document.hidden) return;
    isRunning = true;
    try {
      const page = await fetchPage(location.pathname + location.search);
      if (page) await update(page);
    } catch (error) {
      // The stream's status shows that the server is unreachable.
      if (!isFailedRequest(error)) throw error;
    } finally { isRunning = false; }
  };
}

/** Calls `refresh` every few seconds, and `delayMs` after the last change of a job. */
export function followJobs(refresh, delayMs) {
  let timer = 0;
  const soon = () => { clearTimeout(timer); timer = setTimeout(refresh, delayMs); };
  new Stream({ path: () => "/api/v1/stream", onStatus: showLive, onFrame: soon });
  setInterval(refresh, REFRESH_INTERVAL_MS);
  document.addEventListener("visibilitychange", refresh);
}

/** Elements that scripts fill, which are not changed: lines, and the error of a button. */
const UNCHANGED = ".spark, .error";

const keyOf = (node) => node.dataset?.agent ?? node.dataset?.slot ?? node.dataset?.id ?? "";
const isSameNode = (a, b) => a.nodeType === b.nodeType && a.nodeName === b.nodeName && keyOf(a) === keyOf(b);

/** Changes the node `here` so that it equals `fresh`. */
export function morph(here, fresh) {
  if (here.nodeType !== Node.ELEMENT_NODE) {
    if (here.nodeValue !== fresh.nodeValue) here.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name, value } of fresh.attributes) if (here.getAttribute(name) !== value) here.setAttribute(name, value);
  for (const { name } of [...here.attributes]) if (!fresh.hasAttribute(name)) here.removeAttribute(name);
  if (here.matches(UNCHANGED)) return;
  const old = [...here.childNodes], wanted = [...fresh.childNodes];
  if (old.length !== wanted.length || !old.every((node, i) => isSameNode(node, wanted[i]))) arrange(here, old, wanted);
  else old.forEach((node, i) => morph(node, wanted[i]));
}

/** Adds and removes children. All other children stay. */
function arrange(here, old, wanted) {
  const focused = document.activeElement;
  const children = wanted.map((node) => {
    const at = old.findIndex((known) => isSameNode(known, node));
    if (at < 0) return document.importNode(node, true);
    const [known] = old.splice(at, 1);
    morph(known, node);
    return known;
  });
  here.replaceChildren(...children);
  if (focused !== document.activeElement && here.contains(focused)) focused.focus({ preventScroll: true });
}
