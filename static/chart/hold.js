// A finger that rests on a place before it moves: what a mouse does by dragging. A finger that moves at once scrolls the page.

/** How long it rests, and how far it may stray meanwhile. */
const REST_MS = 350, STRAY = 8;

/** Calls `begin(event)` with the event of a finger that has rested on `root`. From then on its moves are `root`'s alone. */
export function onHold(root, begin) {
  let timer = 0, from = null, held = false;
  const forget = () => { clearTimeout(timer); from = null; held = false; };
  root.addEventListener("pointerdown", (event) => {
    // A second finger means something else.
    if (from || event.pointerType === "mouse") return forget();
    from = event;
    timer = setTimeout(() => { held = true; begin(from); }, REST_MS);
  });
  root.addEventListener("pointermove", (event) => {
    if (from && !held && Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > STRAY) clearTimeout(timer);
  });
  for (const type of ["pointerup", "pointercancel"]) root.addEventListener(type, forget);
  // Else the browser would take the move for one of the page.
  root.addEventListener("touchmove", (event) => { if (held && event.cancelable) event.preventDefault(); }, { passive: false });
  root.addEventListener("contextmenu", (event) => { if (held) event.preventDefault(); });
}
