// A job's network, with its stages as blocks and its layers as a table.

import { ask, byId, errorText, make, setText } from "../page.js";
import { bytes, count, millis, percent, plural, rate } from "../numbers.js";
import { drawMesh } from "./mesh.js";

/** If a stage has a larger fraction of the layers, stages are distinguished by one more part of the layers' names. */
const MAX_SHARE = 0.7;
/** Maximum number of parts of the names that distinguish stages. */
const MAX_DEPTH = 3;

const shape = (sizes) => sizes.map(count).join(" × ");
const time = (us) => (us >= 1000 ? millis(us / 1000) : `${us.toFixed(us < 100 ? 1 : 0)} µs`);
const medianOf = (steps) => (steps > 1 ? `median of ${steps} steps` : "timed once");
const textElement = (tag, textContent) => make(tag, { textContent });
const heading = (textContent) => make("th", { textContent, scope: "row" });
const number = (textContent) => make("td", { textContent, className: "num" });

/** Groups consecutive layers whose names have the same first parts: `{ name, layers }`. */
function stages(layers) {
  for (let depth = 1; ; depth++) {
    const found = [];
    for (const layer of layers) {
      const parts = layer.name.split("."), name = parts.slice(0, Math.min(depth, parts.length - 1)).join(".");
      if (found.at(-1)?.name !== name) found.push({ name, layers: [] });
      found.at(-1).layers.push(layer);
    }
    for (const stage of found) stage.name ||= [...new Set([stage.layers[0].name, stage.layers.at(-1).name])].join(" to ");
    if (depth === MAX_DEPTH || found.every((stage) => stage.layers.length <= MAX_SHARE * layers.length)) return found;
  }
}

const sum = (layers, key) => layers.reduce((all, layer) => all + (layer[key] ?? 0), 0);

/** Returns a plan's figures: `[name, predicted, measured, format]`. Values that are not predicted or not measured yet are undefined. */
function figures({ predicted = {}, measured_step_ms: step, measured_memory_bytes: memory }) {
  const found = [["time of a step", predicted.step_ms, step, millis], ["memory of a rank", predicted.memory_bytes, memory, bytes]];
  if (predicted.step_ms) found.splice(1, 0, ["images a second", predicted.images_per_second, step && (predicted.images_per_second * predicted.step_ms) / step, rate]);
  return found;
}
const difference = (predicted, measured) => (measured && predicted ? `${measured < predicted ? "−" : "+"}${percent(Math.abs(measured / predicted - 1), 0)}` : "–");

export class Network {
  /** `onPlan(plan)`: called if the job has a plan. */
  constructor(job, onPlan) { Object.assign(this, { job, onPlan }); }

  async load() {
    try {
      const { layers, timed_steps: steps, plan } = await ask(`/api/v1/jobs/${this.job}/network`);
      this.#draw(layers, steps, plan);
      if (plan) this.onPlan(plan);
    } catch (error) { setText(byId("network-sum"), errorText(error)); }
  }

  #drawPlan(plan) {
    const { predicted } = plan, unknown = "predictions need `lockstep plan` on this machine";
    setText(byId("plan-words"), [plan.words, ...(predicted ? [`limited by ${predicted.limited_by}`, predicted.why] : [unknown])].join(" · "));
    byId("plan-rows").replaceChildren(...figures(plan).map(([name, expected, measured, format]) => make("tr", {},
      heading(name), number(expected ? format(expected) : "–"), number(measured ? format(measured) : "–"), number(difference(expected, measured)))));
    setText(byId("mesh-note"), drawMesh(byId("mesh"), plan));
  }

  /** Draws the network. `steps`: the number of steps over which a layer's time is the median; undefined if the layers are not timed. */
  #draw(layers, steps, plan) {
    byId("network-plan").hidden = !plan;
    if (plan) this.#drawPlan(plan);
    const predicts = plan?.predicted !== undefined;
    for (const head of document.querySelectorAll("#network-panel [data-plan]")) head.hidden = !predicts;
    const allParameters = sum(layers, "parameters"), isTimed = layers.some((layer) => layer.time_us !== undefined), totalUs = sum(layers, "time_us"), found = stages(layers);
    setText(byId("network-sum"), layers.length ? `${plural(layers.length, "layer")} · ${plural(allParameters, "parameter")}${isTimed ? ` · ${time(totalUs)} in a step, ${medianOf(steps)}` : ""}` : "The network is not known yet.");
    byId("network-time").hidden = !isTimed;
    setText(byId("network-time"), `time, ${medianOf(steps)}`);
    const meter = (title, value, total) => make("meter", { min: 0, max: total || 1, value, title, "aria-label": `${title}: ${percent(total ? value / total : 0)}` });
    byId("network-stages").replaceChildren(...found.map((stage) => {
      const parameters = sum(stage.layers, "parameters"), took = sum(stage.layers, "time_us");
      const item = make("li", {}, textElement("b", stage.name), textElement("span", shape(stage.layers.at(-1).output_shape)), textElement("small", plural(stage.layers.length, "layer")),
        textElement("small", plural(parameters, "parameter")), meter("Share of the parameters", parameters, allParameters));
      if (isTimed) item.append(textElement("small", stage.layers.some((layer) => layer.time_us !== undefined) ? time(took) : "–"), meter("Share of the time", took, totalUs));
      return item;
    }));
    byId("network-rows").replaceChildren(...found.flatMap((stage) => {
      const head = make("tr", { className: "stage" }, make("th", { textContent: stage.name, scope: "rowgroup", colSpan: 4 + (isTimed ? 1 : 0) + (predicts ? 4 : 0) }));
      const rows = stage.layers.map((layer) => {
        const row = make("tr", {}, heading(layer.name), textElement("td", layer.kind), textElement("td", shape(layer.output_shape)), number(layer.parameters ? count(layer.parameters) : "–"));
        if (isTimed) row.append(number(layer.time_us === undefined ? "–" : time(layer.time_us)));
        if (predicts) {
          const planned = layer.plan ?? { time_us: 0, placement: "–", memory_bytes: 0, sent_bytes: 0 };
          row.append(number(time(planned.time_us)), textElement("td", planned.placement), number(bytes(planned.memory_bytes)), number(bytes(planned.sent_bytes)));
        }
        return row;
      });
      return stage.layers.length === 1 && stage.layers[0].name === stage.name ? rows : [head, ...rows];
    }));
  }
}
