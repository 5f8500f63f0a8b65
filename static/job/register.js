// Registers a checkpoint as a version of a model.

import { ask, byId, errorText, text } from "../page.js";

export function register(checkpoint) {
  const error = byId("register-error");
  text(byId("register-title"), `Register checkpoint ${checkpoint.epoch}-${checkpoint.step}`);
  text(error, "");
  // Without a response, the reader types the name.
  ask("/api/v1/models?fields=name").then(({ models }) => byId("register-names").replaceChildren(...models.map((model) => new Option(model.name)))).catch(() => {});
  byId("register-yes").onclick = async (event) => {
    event.preventDefault();
    const body = { name: byId("register-name").value.trim(), checkpoint: checkpoint.id, description: byId("register-description").value };
    try {
      const { model } = await ask("/api/v1/models", { method: "POST", body });
      location.href = `/models/${encodeURIComponent(model)}`;
    } catch (e) { text(error, errorText(e)); }
  };
  byId("register-dialog").showModal();
}
