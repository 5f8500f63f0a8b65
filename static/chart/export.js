// A chart as a file: PNG and SVG as it stands on the page, CSV of what is drawn.

import { palette } from "./palette.js";
import { SvgContext } from "./svg.js";

const HEAD = 34;

function picture(chart, ctx, width, height, title) {
  const colours = palette();
  ctx.fillStyle = colours.card;
  ctx.globalAlpha = 1;
  ctx.fillRect(0, 0, width, height + HEAD);
  ctx.fillStyle = colours.text;
  ctx.font = colours.font;
  ctx.textAlign = "left";
  ctx.textBaseline = "middle";
  ctx.fillText(title, 12, HEAD / 2);
  return colours;
}

async function png(chart, title) {
  const { width, height } = chart.root.getBoundingClientRect(), ratio = 2;
  const canvas = document.createElement("canvas");
  canvas.width = width * ratio;
  canvas.height = (height + HEAD) * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  picture(chart, ctx, width, height, title);
  ctx.translate(0, HEAD);
  chart.paint(ctx, width, height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

function svg(chart, title) {
  const { width, height } = chart.root.getBoundingClientRect();
  const measure = chart.canvas.getContext("2d");
  const inner = new SvgContext(width, height, measure), outer = new SvgContext(width, height + HEAD, measure);
  picture(chart, outer, width, height, title);
  chart.paint(inner, width, height);
  const body = inner.toString().replace("<svg ", `<svg y="${HEAD}" `);
  return new Blob([outer.toString().replace("</svg>", `${body.trim()}</svg>`)], { type: "image/svg+xml" });
}

/** What is drawn: a bucket a row. */
function csv(chart) {
  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = ["line,attempt,step,points,min,max,mean"];
  const [low, high] = chart.view.zoom ?? [-Infinity, Infinity];
  for (const { label, series } of chart.layers()) {
    for (const g of chart.source(series).segments) {
      const xs = chart.view.places(g);
      for (let i = 0; i < g.length; i++) {
        if (xs[i] >= low && xs[i] <= high) lines.push([cell(label), g.attempt, g.steps[i], g.counts[i], g.min[i], g.max[i], g.mean[i]].join(","));
      }
    }
  }
  return new Blob([`${lines.join("\n")}\n`], { type: "text/csv" });
}

const KINDS = { PNG: [png, "png"], SVG: [svg, "svg"], CSV: [csv, "csv"] };

/** Saves a chart as `kind` (PNG, SVG, CSV) under a name of the job and the metric. */
export async function save(chart, kind, name, title) {
  const [make, extension] = KINDS[kind];
  const blob = await make(chart, title);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${name.replace(/[^\w.-]+/g, "-")}.${extension}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** A small menu in a chart's head: every way to save it. `every`: address of the file of all points. */
export function saveMenu(chart, name, title, every) {
  const menu = document.createElement("details");
  menu.className = "menu";
  const summary = document.createElement("summary");
  summary.textContent = "Save";
  summary.setAttribute("aria-label", `Save ${chart.label}`);
  const list = document.createElement("div");
  for (const kind of Object.keys(KINDS)) {
    const button = Object.assign(document.createElement("button"), { type: "button", className: "quiet", textContent: kind });
    button.addEventListener("click", () => { menu.open = false; save(chart, kind, name(), title()); });
    list.append(button);
  }
  if (every) list.append(Object.assign(document.createElement("a"), { className: "button quiet", href: every, textContent: "CSV, every point", download: "" }));
  menu.append(summary, list);
  document.addEventListener("click", (event) => { if (!menu.contains(event.target)) menu.open = false; });
  menu.addEventListener("keydown", (event) => { if (event.key === "Escape") { menu.open = false; summary.focus(); } });
  return menu;
}
