// The mesh of a job's ranks: stages, copies of the network, and for each rank its part of the pictures' rows and of the split layers.

import { count } from "../numbers.js";
import { make, makeSvg } from "../page.js";

/** Width and height of a rank's square, in pixels. */
const SIDE = 28;
/** Approximate maximum number of ranks that are drawn: at least one copy of the network. Further copies are only counted. */
const MAX_RANKS = 64;

/** Returns a rank's coordinates. From rank to rank, `part` varies fastest and the stage slowest (worker/engine/src/plan/mesh.rs). */
function coordinates(rank, { pipeline = 1, height = 1, model = 1 }, ranks) {
  const ranksPerStage = Math.max(1, Math.floor(ranks / pipeline)), within = rank % ranksPerStage;
  return { stage: Math.floor(rank / ranksPerStage), data: Math.floor(within / (model * height)), row: Math.floor(within / model) % height, part: within % model };
}

/** Describes a rank's coordinates in the mesh, and its part of stages, pictures and layers. Empty if each rank has everything. */
export function describePosition(rank, plan, ranks) {
  const { pipeline = 1, height = 1, model = 1, shard = [] } = plan, { stage, data, row, part } = coordinates(rank, plan, ranks), parts = [];
  if (pipeline * height * model === 1) return parts;
  if (pipeline > 1) parts.push(`stage ${stage}`);
  parts.push(`data ${data}`);
  if (height > 1) parts.push(`height ${row}: part ${row + 1} of ${height} of the rows`);
  if (model > 1) parts.push(`model ${part}: part ${part + 1} of ${model} of ${shard.map(({ match }) => match).join(", ") || "the last layer"}`);
  return parts;
}

/** Returns a square that shows the rank's share of the rows as a part of the height, and its share of the layers as a part of the width. */
function square(rank, plan, ranks) {
  const { height = 1, model = 1 } = plan, { row, part } = coordinates(rank, plan, ranks), title = [`rank ${rank}`, ...describePosition(rank, plan, ranks)].join(" · ");
  const picture = makeSvg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, width: SIDE, height: SIDE, "aria-hidden": "true" },
    makeSvg("rect", { class: "all", x: 0.5, y: 0.5, width: SIDE - 1, height: SIDE - 1 }),
    makeSvg("rect", { class: "own", x: (SIDE * part) / model, y: (SIDE * row) / height, width: SIDE / model, height: SIDE / height }),
  );
  return make("span", { className: "mesh-rank", role: "img", title, "aria-label": title }, picture, make("small", { textContent: String(rank) }));
}

/** Draws a plan into a list, with an item for each stage. Returns a text that explains the drawing. */
export function drawMesh(list, plan) {
  const { pipeline = 1, data, height = 1, model = 1, later_stages: later = [] } = plan, stageRanksPerCopy = height * model;
  const ranks = pipeline * data * stageRanksPerCopy, copies = Math.min(data, Math.max(1, Math.floor(MAX_RANKS / (pipeline * stageRanksPerCopy))));
  list.replaceChildren(...Array.from({ length: pipeline }, (_, stage) => {
    const head = pipeline > 1 ? [make("b", { textContent: `stage ${stage}` }), make("small", { textContent: stage ? `from ${later[stage - 1] ?? "?"}` : "from the pictures" })] : [];
    const groups = Array.from({ length: copies }, (_, copy) => {
      const first = (stage * data + copy) * stageRanksPerCopy, group = make("div", { className: "mesh-copy" }, ...Array.from({ length: stageRanksPerCopy }, (_, at) => square(first + at, plan, ranks)));
      group.style.gridTemplateColumns = `repeat(${model}, auto)`;
      return group;
    });
    return make("li", {}, ...head, make("div", { className: "mesh-copies" }, ...groups));
  }));
  const own = pipeline > 1 ? "Ranks of one stage have different pictures, and each stage has the same pictures" : "Each rank has pictures of its own";
  const parts = [stageRanksPerCopy > 1 ? "Ranks in one frame share pictures or layers" : own];
  if (height > 1) parts.push("the filled height is a rank's share of the rows");
  if (model > 1) parts.push("the filled width is a rank's share of the split layers");
  if (copies < data) parts.push(`${count(copies)} of ${count(data)} copies are drawn`);
  return `${parts.join("; ")}.`;
}
