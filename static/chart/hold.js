// Hold gesture: a finger that rests before it moves has the effect of dragging with a mouse. A finger that moves at once scrolls the page.

/** Minimum time that a finger must rest, and the maximum distance that it may move meanwhile. */
const REST_MS = 350, STRAY = 8;

/** Calls `begin(event)` when a finger has rested on `root`. After that, only `root` receives its moves. */
export function onHold(root, begin) {
  let timer = 0, from = null, held = false;
  const forget = () => { clearTimeout(timer); from = null; held = false; };
  root.addEventListener("pointerdown", (event) => {
    // A second finger starts another gesture.
    if (from || event.pointerType === "mouse") return forget();
    from = event;
    timer = setTimeout(() => { held = true; begin(from); }, REST_MS);
  });
  root.addEventListener("pointermove", (event) => {
    if (from && !held && Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > STRAY) clearTimeout(timer);
  });
  for (const type of ["pointerup", "pointercancel"]) root.addEventListener(type, forget);
  // Otherwise the browser would scroll the page.
  root.addEventListener("touchmove", (event) => { if (held && event.cancelable) event.preventDefault(); }, { passive: false });
  root.addEventListener("contextmenu", (event) => { if (held) event.preventDefault(); });
}
