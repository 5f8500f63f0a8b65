// Datasets: an inspection while a path is typed, registering without leaving the page, and the pictures.

import { offerBundled } from "./bundled.js";
import { ask, byId, confirmThen, Problem, sentence, text } from "./page.js";
import { count, plural } from "./numbers.js";
import { Gallery } from "./datasets/gallery.js";

offerBundled();

const INSPECT_AFTER_MS = 600;
const form = byId("add-dataset"), status = byId("add-status");
const errorsOf = { name: byId("d-name-error"), path: byId("d-path-error") };

function show(errors) {
  for (const [name, node] of Object.entries(errorsOf)) {
    const found = errors.filter((e) => e.pointer === `/${name}`).map((e) => e.detail).join("; ");
    text(node, found);
    node.closest(".field").classList.toggle("wrong", found !== "");
  }
  text(status, errors.filter((e) => !(e.pointer.slice(1) in errorsOf)).map((e) => e.detail).join(" "));
}

/** What a folder holds, in a sentence. */
function found({ info }) {
  const size = info.width ? `${info.width} × ${info.height}` : "of different sizes";
  const splits = info.splits.map((s) => plural(s.samples, `${s.name} picture`)).join(", ");
  const broken = info.broken_count ? `; ${plural(info.broken_count, "file")} cannot be read` : "";
  const left = info.unlabelled?.length ? `; left out, as they have no labels: ${info.unlabelled.join(", ")}` : "";
  return `Found ${info.format.replace("_", " ")}: ${splits}, ${size}, ${plural(info.classes.length, "class")} (${info.classes.slice(0, 6).join(", ")}${info.classes.length > 6 ? " …" : ""})${broken}${left}.`;
}

/** Polls until the inspection of the files is done, and shows its progress: the first one of a million pictures takes minutes. */
async function inspected(path, body, signal) {
  for (;;) {
    const answer = await ask(`${path}?wait_secs=3`, { method: "POST", body, signal });
    if (answer.info) return answer;
    text(status, answer.total ? `Inspecting its files: ${count(answer.inspected)} of ${count(answer.total)} …` : "Inspecting its files …");
  }
}

let timer = 0, inspecting = null;
form.path.addEventListener("input", () => {
  clearTimeout(timer);
  inspecting?.abort();
  show([]);
  const path = form.path.value.trim();
  if (path.startsWith("/") && path.length > 1) timer = setTimeout(() => inspect(path), INSPECT_AFTER_MS);
});

async function inspect(path) {
  const mine = inspecting = new AbortController();
  text(status, "Inspecting its files …");
  try {
    const answer = await inspected("/api/v1/datasets/inspect", { path }, mine.signal);
    text(status, found(answer));
    if (!form.name.value.trim()) form.name.value = path.replace(/\/+$/, "").split("/").pop().replace(/[^\w.-]+/g, "-").replace(/^\.+/, "");
  } catch (error) {
    if (mine.signal.aborted) return;
    text(status, "");
    if (error instanceof Problem && error.errors.length) show(error.errors); else text(status, sentence(error));
  }
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  clearTimeout(timer);
  inspecting?.abort();
  const button = form.querySelector("button");
  button.disabled = true;
  show([]);
  text(status, "Inspecting its files …");
  try {
    await inspected("/api/v1/datasets", { name: form.name.value.trim(), path: form.path.value.trim() });
    location.reload();
  } catch (error) {
    button.disabled = false;
    text(status, "");
    if (error instanceof Problem && error.errors.length) show(error.errors); else text(status, sentence(error));
  }
});

for (const card of document.querySelectorAll("[data-dataset]")) {
  const name = card.dataset.dataset;
  new Gallery(card, name);
  card.querySelector("[data-remove]").addEventListener("click", () => confirmThen({
    title: `Remove ${name}?`, detail: "Its files stay where they are; jobs can no longer be submitted on it, and those that are over are neither evaluated nor run again.", yes: "Remove it",
    act: async () => { await ask(`/api/v1/datasets/${encodeURIComponent(name)}`, { method: "DELETE" }); location.reload(); },
  }));
}
