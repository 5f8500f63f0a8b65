// Menus for a chart: the vertical range (fixed ends, and whether outliers count), and smoothing. The choices are in the page's URL.

import { readUrl, writeUrl } from "../address.js";
import { makeClosable, make } from "../page.js";

/** Number of menus, for unique ids. */
let menuCount = 0;

/** Returns a menu for a chart's head. `key`: the chart's name in the URL. `unit`: the axis value of a typed 1, such as 0.01 for percent. */
export function rangeMenu(chart, key, unit = 1) {
  const id = `range-${++menuCount}`, line = (...children) => make("label", { className: "inline" }, ...children);
  const [from, to] = ["from", "to"].map((name) => make("input", { type: "text", inputMode: "decimal", placeholder: "auto", maxLength: 20, autocomplete: "off", id: `${id}-${name}` }));
  const outliers = make("input", { type: "checkbox", id: `${id}-outliers` });
  const summary = make("summary", { textContent: "Range", "aria-label": `Vertical range of ${chart.label}` });
  const menu = make("details", { className: "menu range" }, summary, make("div", {}, line("from", from), line("to", to), line(outliers, "ignore outliers")));
  const parseEnd = (input) => { const v = Number(input.value.trim().replace(",", ".")); return input.value.trim() === "" || !Number.isFinite(v) ? null : v; };
  const apply = () => {
    const ends = [parseEnd(from), parseEnd(to)], isWrong = ends[0] !== null && ends[1] !== null && ends[0] >= ends[1];
    for (const input of [from, to]) input.setAttribute("aria-invalid", String(isWrong || (input.value.trim() !== "" && parseEnd(input) === null)));
    chart.ends = isWrong ? [null, null] : ends.map((v) => (v === null ? null : v * unit));
    chart.robust = outliers.checked;
    const hasEnds = chart.ends.some((v) => v !== null);
    menu.classList.toggle("on", hasEnds || chart.robust);
    chart.invalidate();
    return hasEnds ? ends.map((v) => v ?? "").join("~") : "";
  };
  const applyAndWrite = () => writeUrl({ [`${key}-range`]: apply(), [`${key}-outliers`]: outliers.checked ? "no" : "" });
  for (const input of [from, to, outliers]) input.addEventListener("change", applyAndWrite);
  [from.value, to.value] = `${readUrl(`${key}-range`)}~`.split("~");
  outliers.checked = readUrl(`${key}-outliers`) === "no";
  apply();
  makeClosable(menu, chart.gone);
  return menu;
}

/** Sets up the slider for smoothing, whose value is `smooth` in the URL. Calls `apply(factor)` at once and on changes. */
export function setUpSmoothing(input, output, apply) {
  const show = () => { output.textContent = Number(input.value) ? input.value : "off"; apply(Number(input.value)); };
  const wanted = Number(readUrl("smooth", "0"));
  if (wanted >= 0 && wanted <= Number(input.max)) input.value = String(wanted);
  input.addEventListener("input", show);
  input.addEventListener("change", () => writeUrl({ smooth: Number(input.value) ? input.value : "" }));
  show();
}

/** Returns the range of `values` (sorted in place) without the lowest and the highest hundredth, widened by a tenth at either end. */
export function withoutOutliers(values) {
  values.sort();
  const at = (share) => values[Math.min(values.length - 1, Math.max(0, Math.round(share * (values.length - 1))))];
  const low = at(0.01), high = at(0.99), room = (high - low) * 0.1;
  return [Math.max(values[0], low - room), Math.min(values[values.length - 1], high + room)];
}
