// The page of a model: moves aliases, and removes versions without an alias.

import { ask, byId, confirmThen, sentence, text } from "./page.js";

const name = byId("model").textContent, at = `/api/v1/models/${encodeURIComponent(name)}`;
const alias = (alias) => `${at}/aliases/${encodeURIComponent(alias)}`;

/** Sends a change and shows the page after it, or the reason why the change was refused. */
async function change(path, request) {
  text(byId("model-error"), "");
  try {
    await ask(path, request);
    location.reload();
  } catch (error) { text(byId("model-error"), sentence(error)); }
}

byId("alias")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.currentTarget;
  change(alias(form.alias.value.trim()), { method: "PUT", body: { version: Number(form.version.value) } });
});
for (const button of document.querySelectorAll("[data-unset]")) button.addEventListener("click", () => change(alias(button.dataset.unset), { method: "DELETE" }));
for (const button of document.querySelectorAll("[data-remove]")) {
  const { remove } = button.dataset;
  button.addEventListener("click", () => confirmThen({
    title: `Remove version ${remove} of ${name}?`, detail: "Its checkpoint stays with its job. The number is not given to another version.", yes: "Remove it",
    act: async () => { await ask(`${at}/versions/${remove}`, { method: "DELETE" }); location.reload(); },
  }));
}
