// The keys by which the list is grouped: a menu and the URL. Keys have the same names as in `by` of GET /jobs/groups.

import { make, makeButton, setText } from "../page.js";
import { readUrl } from "../address.js";
import { setting } from "../settings.js";
import { field, menu } from "./filter-menu.js";

/** Keys that are fields of a job. All other keys are settings. */
const JOB_KEYS = { project: (j) => j.project, owner: (j) => j.owner, tag: (j) => j.tags, state: (j) => j.state, name: (j) => j.name };

/** Returns the keys in the URL. */
export const groupedBy = () => readUrl("group_by").split(",").map((key) => key.trim()).filter(Boolean);

/** Whether a job belongs to the group with these values, as far as the job's fields show. */
export function isInGroup(job, values) {
  return groupedBy().every((key, i) => {
    const jobValue = JOB_KEYS[key] ? JOB_KEYS[key](job) : setting(job.spec, key.replace(/^spec\./, "")), value = values[i];
    if (Array.isArray(jobValue) && key === "tag") return value === null ? !jobValue.length : jobValue.includes(value);
    return typeof value === "boolean" ? Boolean(jobValue) === value : (jobValue ?? null) === value;
  });
}

/** Describes a group: `resnet20 · 0.1`. Values of settings are shown with their keys, because the values alone explain little. */
export function describeGroup(values) {
  const none = { owner: "no owner", tag: "no tag" };
  return groupedBy().map((key, i) => {
    const value = values[i], isJobKey = key in JOB_KEYS;
    if (value === null) return none[key] ?? `no ${key.replace(/^spec\./, "")}`;
    return isJobKey ? String(value) : `${key.replace(/^spec\./, "")} ${value}`;
  }).join(" · ");
}

export class Grouping {
  /** `change(values)`: writes values into the URL and reads the list again. `keys()`: returns the settings to offer. */
  constructor(change, keys) {
    this.change = change;
    this.error = make("p", { className: "error", role: "alert" });
    this.input = make("input", { id: "group-key", list: "group-keys", placeholder: "train.lr", maxLength: 100, autocomplete: "off", spellcheck: false });
    const list = make("datalist", { id: "group-keys" }), form = make("form", {}, field("Group by a setting", this.input), make("button", { textContent: "Add" }));
    form.addEventListener("submit", (event) => { event.preventDefault(); this.add(this.input.value.trim()); });
    this.own = make("div", { className: "own-keys", role: "group", "aria-label": "Group by" });
    for (const key of Object.keys(JOB_KEYS)) {
      this.own.append(makeButton(key, () => (groupedBy().includes(key) ? this.remove(key) : this.add(key)), { className: "", "data-key": key }));
    }
    this.menu = menu("Group", "grouping", this.own, form, list, this.error);
    this.menu.addEventListener("toggle", () => { if (this.menu.open) list.replaceChildren(...keys().map((value) => make("option", { value }))); });
    this.draw();
  }

  add(key) {
    const keys = groupedBy();
    if (!key) return setText(this.error, "Write a setting, such as train.lr.");
    if (keys.includes(key)) return;
    this.input.value = "";
    this.change({ group_by: [...keys, key].join(","), open: "" });
  }

  remove(key) { this.change({ group_by: groupedBy().filter((other) => other !== key).join(","), open: "" }); }

  draw() {
    setText(this.error, "");
    for (const button of this.own.children) button.setAttribute("aria-pressed", String(groupedBy().includes(button.dataset.key)));
    this.menu.classList.toggle("on", groupedBy().length > 0);
  }
}
