// The page of a model: moves aliases, and removes versions without an alias.

import { ask, byId, confirmThen, errorText, setMessage, setText } from "./page.js";

const name = byId("model").textContent, path = `/api/v1/models/${encodeURIComponent(name)}`;
const aliasPath = (alias) => `${path}/aliases/${encodeURIComponent(alias)}`;

/** Sends a change, and reloads the page or shows the error in the element with the id `errorId`. */
async function change(url, request, errorId = "model-error") {
  setText(byId(errorId), "");
  try {
    await ask(url, request);
    location.reload();
  } catch (error) { setMessage(byId(errorId), errorText(error)); }
}

byId("alias")?.addEventListener("submit", (event) => {
  event.preventDefault();
  const form = event.currentTarget;
  change(aliasPath(form.alias.value.trim()), { method: "PUT", body: { version: Number(form.version.value) } }, "alias-error");
});
for (const button of document.querySelectorAll("[data-unset]")) button.addEventListener("click", () => change(aliasPath(button.dataset.unset), { method: "DELETE" }));
for (const button of document.querySelectorAll("[data-remove]")) {
  const { remove } = button.dataset;
  button.addEventListener("click", () => confirmThen({
    title: `Remove version ${remove} of ${name}?`, detail: "The job keeps the checkpoint. No other version gets this number.", yes: "Remove it",
    // With its last version, the model and its page are gone.
    act: async () => { await ask(`${path}/versions/${remove}`, { method: "DELETE" }); if (document.querySelectorAll("[data-version]").length > 1) location.reload(); else location.replace("/models"); },
  }));
}
