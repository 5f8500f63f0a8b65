// Saves a chart as a file: PNG and SVG as on the page, or CSV of the drawn data.

import { makeClosable, make, makeButton } from "../page.js";
import { drawKey } from "./lines.js";
import { palette } from "./palette.js";
import { SvgContext } from "./svg.js";

/** Height of the title, in pixels. */
const TITLE = 30;
/** Height of a row of the legend, and of the vertical axis's name, in pixels. */
const ROW = 18;
/** Height of the horizontal axis's name, in pixels. */
const FOOT = 22;
/** Margin at the left and right, in pixels. */
const EDGE = 12;
/** Maximum number of names in a legend. */
const MAX_NAMES = 24;

/**
 * Returns the layout of the texts around the chart: `legend`, the position of each name; `legendBottom`;
 * `chartTop`; `height`, the height of all texts together.
 */
function layout(chart, ctx, width) {
  ctx.font = palette().font;
  const lines = (chart.lines ?? []).slice(0, MAX_NAMES), hiddenCount = (chart.lines?.length ?? 0) - lines.length;
  if (hiddenCount > 0) lines.push({ label: `and ${hiddenCount} more`, colour: "transparent" });
  let x = EDGE, row = 0;
  const legend = lines.map((line) => {
    const itemWidth = 16 + ctx.measureText(line.label).width + 14;
    if (x > EDGE && x + itemWidth > width - EDGE) { x = EDGE; row++; }
    const item = { line, x, row };
    x += itemWidth;
    return item;
  });
  const legendBottom = TITLE + (legend.length ? (row + 1) * ROW : 0);
  return { legend, legendBottom, chartTop: legendBottom + ROW, height: legendBottom + ROW + FOOT };
}

/** Draws the texts around the chart. */
function drawTexts(chart, ctx, width, height, title, { legend, legendBottom, chartTop }) {
  const colours = palette();
  ctx.fillStyle = colours.card;
  ctx.globalAlpha = 1;
  ctx.fillRect(0, 0, width, height + chartTop + FOOT);
  ctx.font = colours.font;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  ctx.fillStyle = colours.text;
  ctx.fillText(title, EDGE, TITLE / 2 + 2);
  for (const { line, x, row } of legend) {
    const y = TITLE + row * ROW + ROW / 2;
    if (line.colour !== "transparent") drawKey(ctx, x, y + 0.5, line, colours.card);
    ctx.fillStyle = colours.text;
    ctx.fillText(line.label, x + 15, y + 0.5);
  }
  ctx.fillStyle = colours.muted;
  ctx.fillText(chart.yName(), EDGE, legendBottom + ROW / 2);
  ctx.textAlign = "center";
  ctx.fillText(chart.xName(), width / 2, chartTop + height + FOOT / 2 - 3);
}

async function png(chart, title) {
  const { width, height } = chart.root.getBoundingClientRect(), ratio = 2;
  const canvas = document.createElement("canvas"), ctx = canvas.getContext("2d"), texts = layout(chart, ctx, width);
  canvas.width = width * ratio;
  canvas.height = (height + texts.height) * ratio;
  ctx.scale(ratio, ratio);
  drawTexts(chart, ctx, width, height, title, texts);
  ctx.translate(0, texts.chartTop);
  chart.paint(ctx, width, height);
  chart.invalidate();
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function svg(chart, title) {
  const { width, height } = chart.root.getBoundingClientRect();
  const measure = document.createElement("canvas").getContext("2d"), texts = layout(chart, measure, width);
  const inner = new SvgContext(width, height, measure), outer = new SvgContext(width, height + texts.height, measure);
  drawTexts(chart, outer, width, height, title, texts);
  chart.paint(inner, width, height);
  chart.invalidate();
  const body = inner.toString().replace("<svg ", `<svg y="${texts.chartTop}" `);
  return new Blob([outer.toString().replace("</svg>", `${body.trim()}</svg>`)], { type: "image/svg+xml" });
}

/** Quotes a text for a CSV file if necessary. */
export const csvCell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

/** Returns the drawn data as CSV, with a row for each bucket. */
function csv(chart) {
  const lines = [`line,attempt,${chart.column()},points,min,max,mean`];
  const [low, high] = chart.view.zoom ?? [-Infinity, Infinity];
  for (const { label, series } of chart.layers()) {
    for (const g of chart.drawnSeries(series).segments) {
      const xs = chart.view.positions(g);
      for (let i = 0; i < g.length; i++) {
        if (xs[i] >= low && xs[i] <= high) lines.push([csvCell(label), g.attempt, g.steps[i], g.counts[i], g.min[i], g.max[i], g.mean[i]].join(","));
      }
    }
  }
  return new Blob([`${lines.join("\n")}\n`], { type: "text/csv" });
}

const KINDS = { PNG: [png, "png"], SVG: [svg, "svg"], CSV: [(chart) => chart.csv?.() ?? csv(chart), "csv"] };

/** Saves a chart as `kind` (PNG, SVG or CSV) in a file called `name`, without extension. `title`: the heading in the picture. */
export async function save(chart, kind, name, title) {
  const [draw, extension] = KINDS[kind];
  const blob = await draw(chart, title);
  const link = make("a", { href: URL.createObjectURL(blob), download: `${name.replace(/[^\w.-]+/g, "-")}.${extension}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Returns the element for a chart's menus: the controls in the head of its card, or the head if there are none. */
export function headOf(root) {
  const head = root.closest(".card").querySelector(".card-head");
  return head.querySelector(".controls") ?? head;
}

/** Returns an element with a chart's menus. */
export const tools = (...menus) => make("div", { className: "tools" }, ...menus);

/** Returns a small menu with all formats. `name()` and `title()`: see `save`. `csvUrl`: URL of the CSV file with all points. */
export function saveMenu(chart, name, title, csvUrl) {
  const buttons = Object.keys(KINDS).map((kind) => makeButton(kind, () => { menu.open = false; save(chart, kind, name(), title()); }));
  if (csvUrl) buttons.push(make("a", { className: "button quiet", href: csvUrl, textContent: "CSV, every point", download: "" }));
  const menu = make("details", { className: "menu" }, make("summary", { textContent: "Save", "aria-label": `Save ${chart.label}` }), make("div", {}, ...buttons));
  makeClosable(menu, chart.gone);
  return menu;
}
