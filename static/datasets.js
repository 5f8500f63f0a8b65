// The page Datasets: registers datasets without leaving the page, and shows pictures.

import { offerBundled } from "./bundled.js";
import { ask, byId, confirmThen, sentence, text } from "./page.js";
import { inspected, offerForm } from "./datasets/form.js";
import { Gallery } from "./datasets/gallery.js";
import { offerUpload } from "./datasets/upload.js";

offerBundled();
// Only some readers may add datasets.
if (byId("add-dataset")) offerForm(byId("add-dataset"));
if (byId("upload")) offerUpload(byId("upload"));

for (const card of document.querySelectorAll("[data-dataset]")) {
  const name = card.dataset.dataset;
  new Gallery(card, name);
  card.querySelector("[data-inspect]")?.addEventListener("click", async ({ currentTarget: button }) => {
    button.disabled = true;
    try {
      await inspected(`/api/v1/datasets/${encodeURIComponent(name)}/inspect`, undefined, undefined, (words, far) => text(button, far || words));
      location.reload();
    } catch (error) {
      button.disabled = false;
      text(button, sentence(error));
    }
  });
  card.querySelector("[data-remove]")?.addEventListener("click", () => confirmThen({
    title: `Remove ${name}?`, detail: "Its files stay where they are, unless they were uploaded: then they are removed, too. No new job can use it, and finished jobs can neither be evaluated nor run again.", yes: "Remove it",
    act: async () => { await ask(`/api/v1/datasets/${encodeURIComponent(name)}`, { method: "DELETE" }); location.reload(); },
  }));
}
