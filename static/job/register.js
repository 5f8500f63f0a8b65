// Registers a checkpoint as a version of a model.

import { ask, byId, openForm, setText } from "../page.js";

/** Returns the versions of all models; of each model, the newest first. */
export async function allVersions() {
  const { models } = await ask("/api/v1/models?fields=name");
  return (await Promise.all(models.map(({ name }) => ask(`/api/v1/models/${encodeURIComponent(name)}`)))).flatMap(({ versions }) => versions);
}

/** Names versions: `shoes 1, shoes 2`. */
export const namesOf = (versions) => versions.map(({ model, version }) => `${model} ${version}`).join(", ");

export function register(checkpoint) {
  const field = byId("register-name");
  let versions = [];
  const describe = () => {
    const newest = versions.find(({ model }) => model === field.value.trim()), same = versions.filter((version) => version.checkpoint === checkpoint.id);
    setText(byId("register-note"), `${newest ? `${newest.model} exists: the checkpoint becomes its next version, after ${newest.version}. ` : ""}${same.length ? `This checkpoint is registered already: ${namesOf(same)}.` : ""}`);
  };
  setText(byId("register-title"), `Register checkpoint ${checkpoint.epoch}-${checkpoint.step}`);
  field.oninput = describe;
  describe();
  // Without a response, the reader types the name.
  allVersions().then((all) => {
    versions = all;
    byId("register-names").replaceChildren(...[...new Set(versions.map(({ model }) => model))].map((model) => new Option(model)));
    describe();
  }).catch(() => {});
  openForm("register", async () => {
    const body = { name: field.value.trim(), checkpoint: checkpoint.id, description: byId("register-description").value };
    const { model } = await ask("/api/v1/models", { method: "POST", body });
    location.href = `/models/${encodeURIComponent(model)}`;
  });
}
