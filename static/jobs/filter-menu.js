// Filters other than states and the search: conditions on settings, project, tags, owner, days, and filters from a link. Each filter is
// shown as a chip, which removes it.

import { ask, byId, makeClosable, make, makeButton, setMessage, setText } from "../page.js";
import { readUrl } from "../address.js";
import { count, twoDigits } from "../numbers.js";
import { parseCondition, filter } from "./query.js";

/** Returns an input of a menu with the label above it. */
export const field = (label, input) => make("label", { className: "small" }, label, input);

/** Adds a menu to the row of filters, before the menu Columns, and returns it. */
export function menu(label, className, ...children) {
  const node = make("details", { className: `menu columns ${className}` }, make("summary", { textContent: label }), make("div", {}, ...children));
  byId("columns").before(node);
  makeClosable(node);
  return node;
}

/** Where the page filters by what is neither a setting nor a result. */
const OTHER_FILTERS = {
  state: "Choose states with the buttons above the list.", notes: "Search the notes with the field above the list.",
  owner: "Choose the owner in this menu, below.", tag: "Choose tags in this menu, below.",
};

const dayOf = (at) => {
  const date = new Date(at);
  return Number.isNaN(date.getTime()) ? "" : `${date.getFullYear()}-${twoDigits(date.getMonth() + 1)}-${twoDigits(date.getDate())}`;
};
/** Returns the beginning of the day that is `later` days after this day, in the reader's time zone, as a time for the URL. */
const startOfDay = (day, later) => {
  const [year, month, date] = day.split("-").map(Number), at = new Date(year, month - 1, date + later);
  return day && !Number.isNaN(at.getTime()) ? at.toISOString() : "";
};
/** Returns the last day before a time. */
const lastDayBefore = (at) => dayOf(Date.parse(at) - 1);

export class FilterMenu {
  /** `change(values)`: writes values into the URL and reads the list again. `keys()`: returns the settings to offer. */
  constructor(change, keys) {
    this.change = change;
    const input = make("input", { id: "condition", list: "condition-keys", placeholder: "lr > 0.1", "aria-describedby": "condition-hint", maxLength: 300, autocomplete: "off", spellcheck: false }), error = make("p", { className: "error", role: "alert" });
    const list = make("datalist", { id: "condition-keys" });
    const form = make("form", {}, field("A setting or result: = != < <= > >=", input), make("button", { textContent: "Add" }));
    const hint = make("p", { className: "small", id: "condition-hint", textContent: "Any setting, the best validation accuracy (best > 80 % or best > 0.8), speed in images/s, or the newest value of a metric, such as val_loss. accuracy is the training accuracy of the newest step." });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const found = parseCondition(input.value), { conditions } = filter();
      if (!found?.value) return setText(error, "Write a setting, a sign and a value, such as lr > 0.1.");
      if (found.value.includes(",")) return setText(error, "The value must not contain a comma.");
      if (Object.hasOwn(OTHER_FILTERS, found.key)) return setText(error, OTHER_FILTERS[found.key]);
      if (/^(best|(val_)?accuracy)$/.test(found.key) && Number(found.value) > 1) return setText(error, `${found.key} is from 0 to 1: write ${found.key} ${found.sign} ${found.value} % or ${found.key} ${found.sign} ${Number(found.value) / 100}.`);
      setText(error, "");
      input.value = "";
      change({ where: [...conditions, `${found.key}${found.sign}${found.value}`].join(",") });
    });
    this.from = make("input", { type: "date", id: "from-day" });
    this.to = make("input", { type: "date", id: "to-day" });
    this.from.addEventListener("change", () => change({ created_after: startOfDay(this.from.value, 0) }));
    this.to.addEventListener("change", () => change({ created_before: startOfDay(this.to.value, 1) }));
    const select = (id, onChoose) => {
      const node = make("select", { id });
      node.addEventListener("change", () => onChoose(node.value));
      return node;
    };
    this.owner = select("owner", (owner) => change({ owner }));
    this.project = select("project", (project) => change({ project }));
    // A chosen tag is added to the other tags, which are shown as chips.
    this.tag = select("tag", (tag) => { if (tag) this.addTag(tag); this.#offer("tag", []); });
    for (const by of ["owner", "project", "tag"]) this.#offer(by, []);
    this.menu = menu("Filter", "narrow", form, hint, list, error, field("Project", this.project), field("Tag", this.tag), field("Owner", this.owner), field("Submitted from", this.from), field("Submitted until", this.to));
    this.menu.addEventListener("toggle", () => {
      if (!this.menu.open) return;
      list.replaceChildren(...["best", "speed", "loss", "val_loss", ...keys()].map((value) => make("option", { value })));
      // Offers the values of the jobs that the reader may see, the most frequent values first.
      for (const by of ["owner", "project", "tag"]) ask(`/api/v1/jobs/groups?by=${by}&sort=-jobs&limit=1000`).then(({ groups }) => { this.known[by] = groups; this.#offer(by, groups); }, () => {});
    });
    this.chips = make("div", { className: "chips", id: "chips", hidden: true });
    document.querySelector(".filter-row").after(this.chips);
    this.problem = make("p", { className: "error", id: "list-problem", role: "alert" });
    this.chips.after(this.problem);
    this.draw();
  }

  /** The values that were offered last, with their numbers of jobs. */
  known = { owner: [], project: [], tag: [] };

  /** Offers values, each with its number of jobs. */
  #offer(by, groups) {
    const current = filter(), chosen = by === "tag" ? "" : current[by], anyLabel = { owner: "anybody", project: "any", tag: current.tags.length ? "one more" : "any" }[by];
    const offered = groups.filter(({ values: [name] }) => name !== null && !(by === "tag" && current.tags.includes(name))).map(({ values: [name], jobs }) => new Option(`${name} (${count(jobs)})`, name));
    if (chosen && !offered.some(({ value }) => value === chosen)) offered.unshift(new Option(chosen, chosen));
    this[by].replaceChildren(new Option(anyLabel, ""), ...offered);
    this[by].value = chosen;
  }

  /** Adds a tag to the filter. */
  addTag(tag) {
    const { tags } = filter();
    if (!tags.includes(tag)) this.change({ tag: [...tags, tag].join(",") });
  }

  draw() {
    const { conditions, after, before, owner, project, tags } = filter(), chips = [];
    const chip = (text, values, what = "filter") => {
      chips.push(makeButton(`${text} ×`, () => { this.change(values()); this.menu.querySelector("summary").focus(); }, { "aria-label": `Remove the ${what} ${text}` }));
    };
    if (project) chip(`project ${project}`, () => ({ project: "" }));
    for (const tag of tags) chip(`tagged ${tag}`, () => ({ tag: filter().tags.filter((other) => other !== tag).join(",") }));
    if (owner) chip(`of ${owner}`, () => ({ owner: "" }));
    for (const condition of conditions) {
      const { key, sign, value } = parseCondition(condition) ?? { key: condition, sign: "", value: "" };
      chip(`${key} ${sign} ${value}`.trim(), () => ({ where: filter().conditions.filter((other) => other !== condition).join(",") }));
    }
    for (const key of readUrl("group_by").split(",").filter(Boolean)) {
      chip(`by ${key}`, () => ({ group_by: readUrl("group_by").split(",").filter((other) => other !== key).join(","), open: "" }), "grouping");
    }
    if (after) chip(`from ${dayOf(after) || after}`, () => ({ created_after: "" }));
    if (before) chip(`until ${lastDayBefore(before) || before}`, () => ({ created_before: "" }));
    this.chips.hidden = !chips.length;
    this.chips.replaceChildren(...chips);
    for (const by of ["owner", "project", "tag"]) this.#offer(by, this.known[by]);
    this.from.value = dayOf(after);
    this.to.value = before ? lastDayBefore(before) : "";
  }

  /** Shows the server's error about the filter or the order, or removes the error if `message` is empty. */
  showProblem(message) { setMessage(this.problem, message.replace(/^where /, "The filter ")); }
}
