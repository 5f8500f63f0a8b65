// Registering a dataset without leaving the page: looking at its files may take a while.

import { ask, byId, Problem, sentence, text } from "./page.js";

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

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = form.querySelector("button");
  button.disabled = true;
  show([]);
  text(status, "Looking at its files …");
  try {
    await ask("/api/v1/datasets", { method: "POST", body: { name: form.name.value.trim(), path: form.path.value.trim() } });
    location.reload();
  } catch (error) {
    button.disabled = false;
    text(status, "");
    if (error instanceof Problem && error.errors.length) show(error.errors); else text(status, sentence(error));
  }
});
