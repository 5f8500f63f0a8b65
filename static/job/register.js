// Registers a checkpoint as a version of a model.

import { ask, byId, openForm, setText } from "../page.js";

export function register(checkpoint) {
  setText(byId("register-title"), `Register checkpoint ${checkpoint.epoch}-${checkpoint.step}`);
  // Without a response, the reader types the name.
  ask("/api/v1/models?fields=name").then(({ models }) => byId("register-names").replaceChildren(...models.map((model) => new Option(model.name)))).catch(() => {});
  openForm("register", async () => {
    const body = { name: byId("register-name").value.trim(), checkpoint: checkpoint.id, description: byId("register-description").value };
    const { model } = await ask("/api/v1/models", { method: "POST", body });
    location.href = `/models/${encodeURIComponent(model)}`;
  });
}
