// The corner that changes a panel's size: it can be dragged with a mouse, a pen or a finger, or moved with arrow keys. Sizes are cells of
// the page's grid: one to three columns, and one to three rows.

import { make } from "../page.js";

/** Maximum number of columns and of rows. */
const MAX_CELLS = 3;
/** Heights of a panel's chart, by rows; the same as in styles/job.css. */
const HEIGHTS = [160, 330, 500];
/** Number of pixels by which the pointer must be beyond the grid's right edge to add a column. */
const BEYOND = 6;
const WIDTH_WORDS = ["a third", "two thirds", "all"], HEIGHT_WORDS = ["low", "medium", "high"];
const KEYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** On narrower pages, panels have the full width, and only their height changes. */
const stacked = matchMedia("(max-width: 720px)");
const clamp = (cells) => Math.min(MAX_CELLS, Math.max(1, cells));
/** Returns the number of rows whose height is nearest. */
const nearest = (pixels) => HEIGHTS.reduce((best, height, i) => (Math.abs(height - pixels) < Math.abs(HEIGHTS[best] - pixels) ? i : best), 0) + 1;

/** Describes a size: `two thirds of the page wide, low height`, or only the height if panels have the full width. */
export const describeSize = ({ columns, rows }) => `${stacked.matches ? "" : `${WIDTH_WORDS[columns - 1]} of the page wide, `}${HEIGHT_WORDS[rows - 1]} height`;

/** Writes a panel's size for styles and screen readers. */
export function showSize(card, panel) {
  card.dataset.columns = panel.columns;
  card.dataset.rows = panel.rows;
  card.querySelector(".grip")?.setAttribute("aria-label", `Size of ${panel.title}: ${describeSize(panel)}. Arrow keys change it.`);
}

/** Adds the corner to a panel's card. `onResize(before)`: called with the old size, to store the new size. */
export function addGrip(card, panel, onResize) {
  const grip = make("button", { type: "button", className: "quiet grip", title: "Drag it, or press an arrow key" });
  let drag = null;
  card.append(grip);
  showSize(card, panel);

  const resize = (columns, rows) => {
    if (columns === panel.columns && rows === panel.rows) return;
    Object.assign(panel, { columns, rows });
    showSize(card, panel);
  };
  /** Returns the columns and rows nearest to the old size plus the pointer's movement. */
  const sizeAt = ({ clientX, pageY }) => {
    const { left, right } = card.parentElement.getBoundingClientRect(), third = (right - left) / MAX_CELLS, { before } = drag;
    const columns = clamp(Math.round(before.columns + (clientX - drag.x) / third));
    // A panel at the right edge grows only by a movement beyond the edge.
    const added = columns === before.columns && clientX > right + BEYOND ? 1 : 0;
    return [stacked.matches ? before.columns : clamp(columns + added), nearest(HEIGHTS[before.rows - 1] + pageY - drag.y)];
  };
  grip.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    grip.setPointerCapture(event.pointerId);
    const { columns, rows } = panel;
    drag = { before: { columns, rows }, x: event.clientX, y: event.pageY };
    card.classList.add("sized");
  });
  grip.addEventListener("pointermove", (event) => { if (drag) resize(...sizeAt(event)); });
  const end = (event) => {
    if (!drag) return;
    const { before } = drag;
    drag = null;
    card.classList.remove("sized");
    if (event.type === "pointercancel") resize(before.columns, before.rows);
    else if (before.columns !== panel.columns || before.rows !== panel.rows) onResize(before);
  };
  grip.addEventListener("pointerup", end);
  grip.addEventListener("pointercancel", end);
  grip.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && drag) return end({ type: "pointercancel" });
    const by = KEYS[event.key];
    if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const { columns, rows } = panel;
    resize(stacked.matches ? columns : clamp(columns + by[0]), clamp(rows + by[1]));
    if (columns !== panel.columns || rows !== panel.rows) onResize({ columns, rows });
  });
  return grip;
}
