// Colours for canvases, read from the page's custom properties, so that both themes are defined in one place.
// Colour-blind readers can distinguish the ranks' colours, which differ in lightness as well as in hue.

/** Number of colours of ranks. For more ranks, charts draw only the mean with its band. */
export const RANK_COLOURS = 8;

const NAMES = ["text", "muted", "line", "grid", "card", "accent", "accent-2", ...Array.from({ length: RANK_COLOURS }, (_, i) => `rank-${i}`)];

let cache = null;
let isListening = false;
const watchers = new Set();

/** Listens for changes of the theme. Called at the first use, because reading the theme earlier causes an additional layout of the page. */
function listen() {
  isListening = true;
  const changed = () => { cache = null; for (const callback of watchers) callback(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  new MutationObserver(changed).observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
}

/** Returns `{ text, muted, grid, card, accent, ..., ranks: [...] }`, with colours as a canvas accepts them, and `font`. */
export function palette() {
  if (cache) return cache;
  if (!isListening) listen();
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colours = {};
  for (const name of NAMES) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  colours.ranks = Array.from({ length: RANK_COLOURS }, (_, i) => colours[`rank-${i}`]);
  colours.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  cache = colours;
  return colours;
}

/** Calls `callback` whenever the theme is changed, by the system or by the button. */
export function onThemeChange(callback) { watchers.add(callback); }
