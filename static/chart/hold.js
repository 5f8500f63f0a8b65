// Long press: a finger that rests before it moves has the effect of dragging with a mouse. A finger that moves at once scrolls the page.

/** Minimum duration of a long press in milliseconds, and the maximum distance in pixels that the finger may move meanwhile. */
const LONG_PRESS_MS = 350, MAX_MOVE = 8;

/** Calls `begin(event)` after a long press on `root`. Until the finger is lifted, its moves do not scroll the page. */
export function onLongPress(root, begin) {
  let timer = 0, from = null, held = false;
  const forget = () => { clearTimeout(timer); from = null; held = false; };
  root.addEventListener("pointerdown", (event) => {
    // A second finger starts another gesture.
    if (from || event.pointerType === "mouse") return forget();
    from = event;
    timer = setTimeout(() => { held = true; begin(from); }, LONG_PRESS_MS);
  });
  root.addEventListener("pointermove", (event) => {
    if (from && !held && Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > MAX_MOVE) clearTimeout(timer);
  });
  for (const type of ["pointerup", "pointercancel"]) root.addEventListener(type, forget);
  // Without this, the browser would scroll the page.
  root.addEventListener("touchmove", (event) => { if (held && event.cancelable) event.preventDefault(); }, { passive: false });
  root.addEventListener("contextmenu", (event) => { if (held) event.preventDefault(); });
}
