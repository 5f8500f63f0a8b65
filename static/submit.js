// The form for a new job: checks the job while the reader types, shows every mistake next to its field, and shows the job as a file to
// copy. Without this script, the form posts itself, and the server responds with the mistakes.

import { offerBundled } from "./bundled.js";
import { ask, byId, copy, fetchPage, make, markPressed, Problem, errorText, errorTexts, setMessage, setText } from "./page.js";
import { count, duration, plural } from "./numbers.js";
import { lineMistake, sweepSection, showSweep, sweptKeys } from "./submit/sweep.js";

const readsOnly = document.body.dataset.readsOnly !== undefined;

offerBundled();

const CHECK_AFTER_MS = 250;
const form = byId("job-form"), fields = [...form.querySelectorAll("[data-default]")];
/** The fields beside which mistakes are shown before the form is submitted. */
let touched = new Set(fields.filter(({ name, value }) => name === "data.dataset" && value));
/** The values of each recipe, and the hidden field with the name of the recipe whose values the fields have. */
const recipes = JSON.parse(form.dataset.recipes), filledRecipe = byId("filled");
/** Maximum number of jobs whose best checkpoints are offered as weights. */
const MAX_OFFERED_JOBS = 10;
/** The key whose default depends on the dataset. */
const DATASET_DEFAULT = "data.validation";
/** Whether the reader has submitted the form. Before that, only mistakes in fields that the reader has changed or left are shown. */
let isSubmitted = document.querySelector(".field.wrong") !== null;
let notation = "toml";

// --- the job in the form ----------------------------------------------------------------------------

const fieldOf = (name) => fields.find((field) => field.name === name);
const valueOf = (field) => (field.type === "checkbox" ? String(field.checked) : field.value.trim());

/** Returns the values that the form's recipe sets, by key. */
const recipeValues = () => recipes[filledRecipe.value] ?? {};

/** Returns the effective value of a field: an empty field has its default, unless the recipe sets the key. */
const effectiveValue = (field) => valueOf(field) || (field.name in recipeValues() ? "" : field.dataset.default);

/**
 * Writes a value, as text, into a field. Defaults are shown as the placeholder. If the recipe sets the key, the default is written out,
 * because an empty field means the recipe's value. A dataset that the field lacks is added as a choice.
 */
function writeValue(field, value) {
  if (field.type === "checkbox") field.checked = value === "true";
  else if (field.tagName === "SELECT" && value && ![...field.options].some((option) => option.value === value)) field.add(new Option(`${value}, not registered`, value, true, true));
  else field.value = field.type === "text" && value === field.dataset.default && !(field.name in recipeValues()) ? "" : value;
}

/** Returns each field's value without the recipe: the default instead of a recipe's value. A validation set that equals the recipe's stays. */
function valuesWithoutRecipe() {
  const isOfRecipe = (field) => effectiveValue(field) === recipeValues()[field.name] && field.name !== DATASET_DEFAULT;
  return new Map(fields.map((field) => [field, isOfRecipe(field) ? field.dataset.default : effectiveValue(field)]));
}

/** For each field that the reader has not edited: the value that the page proposes, and that the recipe may replace. */
let proposed = valuesWithoutRecipe();
/** Whether these values are suggestions for the chosen dataset. Values of a preset, of another job or of a pasted file stay for any dataset. */
let hasSuggestions = !["from", "preset"].some((key) => new URLSearchParams(location.search).has(key));

/**
 * Writes the recipe's value into a field, or else the proposed value. A validation set other than the default stays, because accuracies on
 * other pictures cannot be compared; `showReplaced` names a replaced default.
 */
function writeProposed(field) {
  const value = proposed.get(field), isReplaced = field.name in recipeValues() && (field.name !== DATASET_DEFAULT || value === field.dataset.default);
  writeValue(field, isReplaced ? recipeValues()[field.name] : value);
}

/** Replaces the suggestions for the previous dataset with the suggestions for the chosen dataset. */
async function suggest() {
  const dataset = fieldOf("data.dataset").value, page = hasSuggestions && await fetchPage(`/jobs/new?dataset=${encodeURIComponent(dataset)}`).catch(() => null);
  if (!page || !hasSuggestions || fieldOf("data.dataset").value !== dataset) return;
  for (const field of proposed.keys()) {
    // Weights belong to a network.
    if (field.name === "model.arch" && valueOf(weights)) continue;
    const suggestion = page.getElementById(field.id);
    proposed.set(field, valueOf(suggestion) || suggestion.dataset.default);
    writeProposed(field);
  }
  checkSoon();
}

/** Requests the job that the form describes, without settings at their defaults, shows it as a file, and returns it. */
async function readForm(signal) {
  const texts = Object.fromEntries([filledRecipe, ...fields].map((field) => [field.name, valueOf(field)]));
  const file = await ask("/api/v1/jobs/form", { method: "POST", body: { fields: texts, sweep: sweepSection() }, signal });
  const area = byId("spec-text");
  // The text must not change while the reader edits it.
  if (document.activeElement !== area) {
    area.value = notation === "toml" ? file.toml : `${JSON.stringify(file.document, null, 2)}\n`;
    setText(byId("spec-error"), "");
    isUnread = false;
  }
  return file.document;
}

// --- the same job, written as a file ------------------------------------------------------------------

/** Whether the form does not have the text's values: the text is new or has mistakes. `reading` aborts the newest call of `readText`. */
let isUnread = false, readTimer = 0, reading = null;

/** Throws the mistake of a line of the sweep. The server does not see the lines. */
function checkLines() {
  const detail = lineMistake();
  if (detail) throw new Problem(422, { errors: [{ pointer: "/sweep/parameters", detail }] });
}

/** Sends the text, in either notation, to the server, and fills the form with the parsed job. */
async function readText() {
  if (readsOnly) return;
  const area = byId("spec-text"), text = area.value, isJson = text.trimStart().startsWith("{");
  const written = isJson ? "json" : "toml";
  if (written !== notation) { notation = written; markPressed(notations, notations.find((b) => b.dataset.notation === written)); }
  let content;
  checkRequest?.abort();
  reading?.abort();
  const { signal } = reading = new AbortController();
  try {
    content = await ask("/api/v1/jobs/validate", { method: "POST", headers: { "content-type": isJson ? "application/json" : "application/toml" }, body: new Blob([text]), signal });
  } catch (error) {
    if (signal.aborted || text !== area.value) return;
    // The mistakes of an earlier text no longer apply.
    showMistakes([]);
    setMessage(byId("spec-error"), `${errorTexts(error)}\nThe form keeps its values until the file has no mistake.`);
    return showPlan(null);
  }
  if (signal.aborted || text !== area.value) return;
  isUnread = false;
  setText(byId("spec-error"), "");
  fillForm(content.spec);
  showSweep(content.sweep);
  showMistakes([]);
  showPlan(content);
}

/** Formats a value of a specification as the text of its field. */
function fieldText(value) {
  if (Array.isArray(value)) return value.map((v) => (Array.isArray(v) ? v.join(": ") : v)).join(", ");
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

function fillForm(spec) {
  filledRecipe.value = spec.train.recipe ?? "";
  for (const field of fields) {
    const [table, key] = field.name.includes(".") ? field.name.split(".") : [null, field.name];
    writeValue(field, fieldText((table ? spec[table] : spec)?.[key] ?? ""));
  }
  proposed = valuesWithoutRecipe();
  hasSuggestions = false;
  // Values that were written in the text are the reader's.
  for (const field of fields) if (effectiveValue(field) !== (recipeValues()[field.name] ?? field.dataset.default)) markEdited(field);
  showReplaced();
  unmarkPresets();
}

/** Marks the value of a field as the reader's, which neither a recipe nor a suggestion replaces. */
function markEdited(field) {
  touched.add(field);
  // Two batch sizes are a mistake in the global one.
  if (field.name === "train.batch_size") touched.add(fieldOf("train.global_batch_size"));
  proposed.delete(field);
}

const weights = fieldOf("model.pretrained");
/** Fills the fields that the reader has not edited, or has emptied, with the values of a recipe, and restores what the previous recipe replaced. */
function chooseRecipe(name) {
  const previous = recipeValues();
  filledRecipe.value = name;
  for (const field of fields.filter((f) => f.name in previous || f.name in recipeValues())) {
    if (!proposed.has(field) && !valueOf(field)) proposed.set(field, field.dataset.default);
    if (proposed.has(field)) writeProposed(field);
  }
  // The recipe finetune needs weights, so an empty field is shown as a mistake at once.
  touched.add(weights);
}

// The list already has the names of weights that can be downloaded. Models, and the best checkpoints of the newest jobs, come first. Without
// a response, the reader types the weights.
weights.addEventListener("focus", async () => {
  const read = async (key, query) => (await ask(`/api/v1/${query}`).catch(() => ({ [key]: [] })))[key];
  const [models, jobs] = await Promise.all([read("models", "models?fields=name,aliases,newest"), read("jobs", `jobs?state=succeeded&fields=id,name,spec&limit=${MAX_OFFERED_JOBS}`)]);
  const versions = ({ aliases, newest }) => (Object.keys(aliases).length ? Object.keys(aliases).map((alias) => `@${alias}`) : [`/${newest.version}`]);
  const checkpoints = await Promise.all(jobs.map(async ({ id, name, spec }) => {
    const all = (await read("checkpoints", `jobs/${id}/checkpoints?fields=id,best,missing`)).filter((c) => !c.missing), best = all.find((checkpoint) => checkpoint.best) ?? all[0];
    return best ? [new Option(`best of ${name}, ${spec.model.arch}`, best.id)] : [];
  }));
  weights.list.prepend(...models.flatMap((model) => versions(model).map((version) => new Option(`models:/${model.name}${version}`))), ...checkpoints.flat());
}, { once: true });

/** Lists the settings that the recipe has replaced. Defaults are left out, except the validation set. */
function showReplaced() {
  const isListed = ([field, value]) => field.name in recipeValues() && value !== valueOf(field) && (value !== field.dataset.default || field.name === DATASET_DEFAULT);
  const named = [...proposed].filter(isListed).map(([field, value]) => `${field.labels[0].textContent.trim()} (was ${value})`);
  setText(byId("replaced"), named.length ? `The recipe changed ${named.join(", ")}. Choose the recipe "none" to restore these values.` : "");
}

byId("spec-text").addEventListener("input", () => { if (!readsOnly) addEventListener("beforeunload", keepPage); isUnread = true; clearTimeout(readTimer); readTimer = setTimeout(readText, CHECK_AFTER_MS); });
byId("spec-text").addEventListener("blur", async () => {
  // The form's check would write the form's earlier values into the text.
  if (isUnread) await readText();
  if (!isUnread) check();
});

// --- mistakes ---------------------------------------------------------------------------------------

const sweepField = byId("sweep-parameters");
const linkTo = (field) => make("a", { href: `#${field.id}`, textContent: field.labels[0].textContent.trim() });

/** The key that a mistake is about, such as `train.lr`. */
const pathOf = ({ pointer }) => pointer.replace(/^\//, "").replaceAll("/", ".");
/** Whether `path` is the key, or below it. */
const isAt = (path, key) => path === key || path.startsWith(`${key}.`);

/** Shows each mistake next to its field and, after the form was submitted, a list of all mistakes above the form. */
function showMistakes(errors) {
  const detailsOf = new Map([...fields, sweepField].map((f) => [f, []])), listed = [], swept = sweptKeys(), wrongLine = lineMistake();
  // The server does not see the lines. For a wrong line it reports an unknown key, which is replaced by the line's mistake.
  if (wrongLine && errors.length) errors = [{ pointer: "/sweep/parameters", detail: wrongLine }, ...errors.filter((error) => fields.some(({ name }) => isAt(pathOf(error), name)))];
  for (const error of errors) {
    const path = pathOf(error), key = swept.find((name) => isAt(path, name));
    const own = fields.find(({ name }) => isAt(path, name)), isShown = isSubmitted || touched.has(own);
    // A field that the reader has not changed has a mistake because of the sweep's values, such as a sweep of data.folds.
    const isOfSweep = key || (own && swept.length > 0 && !isShown), field = isAt(path, "sweep") || isOfSweep ? sweepField : own;
    if (field) detailsOf.get(field).push(isOfSweep ? `${key ?? path}: ${error.detail}` : error.detail);
    const message = make("span");
    setMessage(message, error.detail);
    listed.push(make("li", {}, ...(field ? [linkTo(field), ": "] : []), message));
  }
  for (const [field, details] of detailsOf) {
    const shown = isSubmitted || touched.has(field) || field === sweepField ? details : [];
    const box = field.closest(".field");
    box.classList.toggle("wrong", shown.length > 0);
    field.setAttribute("aria-invalid", String(shown.length > 0));
    setMessage(byId(`${field.id}-error`), [...new Set(shown)].join("; "));
    if (!shown.length || !isSubmitted) continue;
    field.closest("details")?.setAttribute("open", "");
    if (box.hidden) findSettings("");
  }
  const box = byId("mistakes"), isListShown = isSubmitted && errors.length > 0;
  box.hidden = !isListShown;
  if (isListShown) {
    setText(box.querySelector("b"), errors.length === 1 ? "One thing to change" : `${errors.length} things to change`);
    box.querySelector("ul").replaceChildren(...listed);
  }
}

/** Keys that change the number of steps. If a sweep sets one of these keys, the number differs between its trials. */
const STEP_COUNT_KEYS = /^(data|parallel)\.|^train\.(recipe|epochs|steps|batch_size|global_batch_size|accumulate)$/;

/** Notes at each field whether the sweep replaces the field's value. `swept`: the keys that the sweep sets. */
function showSwept(swept) {
  for (const field of fields) {
    const hint = byId(`${field.id}-hint`), note = hint.querySelector("b");
    if (swept.includes(field.name) === Boolean(note)) continue;
    if (note) note.remove(); else hint.append(make("b", { textContent: " replaced by the sweep" }));
  }
}

function showPlan(response) {
  const { samples, is_expected: isExpected, steps_per_epoch, total_steps, global_batch_size, estimate } = response ?? {};
  const parts = [];
  const { data } = response?.spec ?? {};
  const about = isExpected ? "about " : "";
  const trials = response?.trials && plural(response.trials, "trial"), swept = sweptKeys();
  if (trials) parts.push(trials);
  showSwept(swept);
  setText(byId("send"), trials ? `Submit ${trials}` : "Submit job");
  if (samples) parts.push(`${about}${plural(samples, "picture")}`);
  if (global_batch_size) parts.push(`${count(global_batch_size)} a step`);
  if (steps_per_epoch) parts.push(`${about}${plural(steps_per_epoch, "step")} an epoch`);
  const remainder = data?.drop_remainder ? samples % global_batch_size : 0;
  if (remainder > samples / 10) parts.push(`${about}${plural(remainder, "picture")} left out of each epoch (an incomplete step)`);
  const ofSteps = !trials ? "steps in all" : swept.some((key) => STEP_COUNT_KEYS.test(key)) ? "steps in the first trial" : "steps each";
  if (total_steps) parts.push(`${response.spec?.train.steps ? "" : about}${count(total_steps)} ${ofSteps}`);
  if (estimate) parts.push(`about ${duration(estimate.secs)} of training${trials ? " for the first trial" : ""}, as fast as the job "${estimate.name}"`);
  else if (response) parts.push("time unknown until a job with this network, image size, batch size and number of ranks has trained 20 steps; the page of the submitted job shows the time left");
  const split = data?.validation, field = fieldOf(DATASET_DEFAULT);
  // If the dataset lacks the default split, the server chooses another split.
  if (split && String(split) !== effectiveValue(field)) parts.push(`measured by ${split}`);
  setText(byId("plan"), parts.join(" · "));
  // An empty field shows the learning rate of the job as the placeholder. A recipe's learning rate depends on the batch size.
  const lr = fieldOf("train.lr");
  lr.placeholder = response?.spec?.train.lr ?? (filledRecipe.value ? "" : lr.dataset.default);
  const bundled = byId("bundled");
  if (bundled) bundled.hidden = valueOf(fieldOf("data.dataset")) !== "fashion-mnist";
  const warnings = byId("warnings"), given = response?.warnings ?? [];
  warnings.hidden = !given.length;
  setMessage(warnings.querySelector("span"), given.map((warning) => warning.replace(/\.?$/, ".")).join(" "));
}

let checkTimer = 0, checkRequest = null;
/** Shows which settings the recipe has replaced, and soon checks the changed form. */
function checkSoon() {
  showReplaced();
  clearTimeout(checkTimer);
  checkTimer = setTimeout(check, CHECK_AFTER_MS);
}

async function check() {
  checkRequest?.abort();
  const { signal } = checkRequest = new AbortController();
  let plan;
  try {
    const body = await readForm(signal);
    // Mistakes are not shown to readers who may not start jobs.
    if (readsOnly) return setText(byId("plan"), "Starting jobs needs another role. You can copy the file beside the form.");
    plan = await ask("/api/v1/jobs/validate", { method: "POST", body, signal });
    checkLines();
  } catch (error) {
    if (signal.aborted) return;
    // The file beside the form still has earlier values.
    if (error.status !== 422) return setMessage(byId("spec-error"), errorText(error));
    showMistakes(error.errors);
    return showPlan(null);
  }
  showMistakes([]);
  showPlan(plan);
}

// --- actions of the reader --------------------------------------------------------------------------

/** Makes the browser ask before the page is left, because the form would lose what the reader has typed. */
const keepPage = (event) => event.preventDefault();

form.addEventListener("input", ({ target }) => {
  if (!readsOnly) addEventListener("beforeunload", keepPage);
  markEdited(target);
  if (target.name === "train.recipe") chooseRecipe(target.value);
  if (target.name === "data.dataset") suggest();
  unmarkPresets();
  checkSoon();
});
form.addEventListener("focusout", (event) => { if (event.target.value) touched.add(event.target); });

const findInput = byId("find-setting");

/** Returns the settings whose key, name, hint or choices contain the text in the search field. */
function matchingSettings() {
  const wanted = findInput.value.trim().toLowerCase();
  return fields.filter((field) => `${field.closest(".field").textContent} ${field.name}`.toLowerCase().includes(wanted));
}

/** Hides the settings under "More settings" that lack the text, and shows links to the other settings that contain the text. */
function findSettings(text) {
  if (findInput.value !== text) findInput.value = text;
  const found = matchingSettings(), above = text.trim() ? found.filter((field) => !field.closest(".more")) : [];
  for (const section of document.querySelectorAll(".more fieldset")) {
    const inside = fields.filter((field) => section.contains(field));
    for (const field of inside) field.closest(".field").hidden = !found.includes(field);
    section.hidden = !inside.some((field) => found.includes(field));
  }
  const links = above.flatMap((field, i) => [i ? ", " : "Above: ", linkTo(field)]);
  byId("found").replaceChildren(...links, found.length ? "" : "No setting contains these words.");
}
byId("find").hidden = false;
findInput.addEventListener("input", (event) => { event.stopPropagation(); findSettings(findInput.value); });
findInput.addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  if (findInput.value.trim()) matchingSettings()[0]?.focus();
});

const presets = [...document.querySelectorAll("[data-preset]")];
function unmarkPresets() {
  for (const p of presets) p.removeAttribute("aria-current");
  byId("preset-done").hidden = true;
}
for (const preset of presets) {
  preset.addEventListener("click", (event) => {
    event.preventDefault();
    const values = JSON.parse(preset.dataset.values), before = fields.map(valueOf), recipe = filledRecipe.value;
    const proposedBefore = proposed, touchedBefore = touched, hadSuggestions = hasSuggestions;
    filledRecipe.value = "";
    for (const field of fields) writeValue(field, values[field.name] ?? "");
    proposed = valuesWithoutRecipe();
    hasSuggestions = false;
    unmarkPresets();
    preset.setAttribute("aria-current", "true");
    byId("preset-done").hidden = false;
    byId("preset-undo").onclick = () => {
      filledRecipe.value = recipe;
      fields.forEach((field, i) => writeValue(field, before[i]));
      proposed = proposedBefore;
      hasSuggestions = hadSuggestions;
      touched = touchedBefore;
      unmarkPresets();
      preset.focus();
      checkSoon();
    };
    isSubmitted = false;
    // A preset's dataset or ranks may not fit this machine, so mistakes in these fields are shown at once.
    touched = new Set(["data.dataset", "parallel.ranks"].map(fieldOf));
    checkSoon();
  });
}

/**
 * The last job that the server has not accepted, and its idempotency key. If a response is lost and the same job is submitted again, the
 * server returns the job that it has already created.
 */
let unanswered = null;
form.addEventListener("submit", async (event) => {
  event.preventDefault();
  clearTimeout(checkTimer);
  clearTimeout(readTimer);
  checkRequest?.abort();
  isSubmitted = true;
  if (isUnread) await readText();
  if (isUnread) return setText(byId("plan"), "The job file was not read: the message beside it says why.");
  const button = byId("send");
  button.disabled = true;
  setText(byId("plan"), "");
  try {
    const body = await readForm(), kind = body.sweep ? "sweeps" : "jobs", text = JSON.stringify(body);
    checkLines();
    if (text !== unanswered?.text) unanswered = { text, key: crypto.randomUUID?.() ?? String(Math.random()) };
    const made = await ask(`/api/v1/${kind}`, { method: "POST", body, headers: { "idempotency-key": unanswered.key } });
    unanswered = null;
    removeEventListener("beforeunload", keepPage);
    location.href = `/${kind}/${made.id}`;
  } catch (error) {
    button.disabled = false;
    if (error instanceof Problem && error.errors.length) {
      showMistakes(error.errors);
      (form.querySelector(".field.wrong :is(input, select, textarea)") ?? byId("mistakes")).focus?.();
      byId("mistakes").scrollIntoView({ block: "nearest" });
    } else setMessage(byId("plan"), errorText(error));
  }
});

const notations = [...document.querySelectorAll("[data-notation]")];
for (const button of notations) button.addEventListener("click", () => { notation = button.dataset.notation; markPressed(notations, button); check(); });
byId("copy-spec").addEventListener("click", async ({ currentTarget }) => {
  // The file may lack the newest change of the form. `check` shows errors.
  if (!isUnread) await readForm().catch(() => {});
  copy(byId("spec-text").value, currentTarget);
});

byId("sweep-settings").hidden = false;
byId("spec-side").hidden = false;
byId("spec-side").parentElement.classList.add("with-spec");
// Without any dataset, the page's notice says what to do.
if (readsOnly || form.dataset.hasDatasets !== undefined) check();
