// Long press: a finger that rests before it moves drags like a mouse. A finger that moves without a long press scrolls the page.

/** Minimum duration of a long press in milliseconds, and the maximum distance in pixels that the finger may move meanwhile. */
const LONG_PRESS_MS = 350, MAX_MOVE = 8;

/** Calls `begin(event)` after a long press on `root`. Until the finger is lifted, its moves do not scroll the page. */
export function onLongPress(root, begin) {
  let timer = 0, from = null, isHeld = false;
  const reset = () => { clearTimeout(timer); from = null; isHeld = false; };
  root.addEventListener("pointerdown", (event) => {
    // A second finger starts another gesture.
    if (from || event.pointerType === "mouse") return reset();
    from = event;
    timer = setTimeout(() => { isHeld = true; begin(from); }, LONG_PRESS_MS);
  });
  root.addEventListener("pointermove", (event) => {
    if (from && !isHeld && Math.hypot(event.clientX - from.clientX, event.clientY - from.clientY) > MAX_MOVE) clearTimeout(timer);
  });
  for (const type of ["pointerup", "pointercancel"]) root.addEventListener(type, reset);
  // Without this, the browser would scroll the page.
  root.addEventListener("touchmove", (event) => { if (isHeld && event.cancelable) event.preventDefault(); }, { passive: false });
  root.addEventListener("contextmenu", (event) => { if (isHeld) event.preventDefault(); });
}
