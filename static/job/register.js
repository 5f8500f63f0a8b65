// Registers a checkpoint as a version of a model.

import { ask, byId, openForm, setText } from "../page.js";

export function register(checkpoint) {
  const field = byId("register-name");
  let models = [];
  const describe = () => {
    const { newest } = models.find(({ name }) => name === field.value.trim()) ?? {};
    const next = newest?.checkpoint === checkpoint.id ? `Its version ${newest.version} is this checkpoint.` : `The checkpoint becomes its next version, after ${newest?.version}.`;
    setText(byId("register-note"), newest ? `${newest.model} exists. ${next}` : "");
  };
  setText(byId("register-title"), `Register checkpoint ${checkpoint.epoch}-${checkpoint.step}`);
  field.oninput = describe;
  describe();
  // Without a response, the reader types the name.
  ask("/api/v1/models?fields=name,newest").then((all) => {
    ({ models } = all);
    byId("register-names").replaceChildren(...models.map(({ name }) => new Option(name)));
    describe();
  }).catch(() => {});
  openForm("register", async () => {
    const body = { name: field.value.trim(), checkpoint: checkpoint.id, description: byId("register-description").value };
    const { model } = await ask("/api/v1/models", { method: "POST", body });
    location.href = `/models/${encodeURIComponent(model)}`;
  });
}
