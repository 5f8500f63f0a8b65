// The page Datasets: registers datasets without leaving the page, and shows pictures.

import { offerBundled } from "./bundled.js";
import { ask, byId, confirmThen, errorText, setText } from "./page.js";
import { postUntilInspected, setUpForm } from "./datasets/form.js";
import { Gallery } from "./datasets/gallery.js";
import { offerUpload } from "./datasets/upload.js";

offerBundled();
// The forms exist only for readers who may add datasets.
if (byId("add-dataset")) setUpForm(byId("add-dataset"));
if (byId("upload")) offerUpload(byId("upload"));

for (const card of document.querySelectorAll("[data-dataset]")) {
  const name = card.dataset.dataset;
  new Gallery(card, name);
  card.querySelector("[data-inspect]")?.addEventListener("click", async ({ currentTarget: button }) => {
    button.disabled = true;
    try {
      await postUntilInspected(`/api/v1/datasets/${encodeURIComponent(name)}/inspect`, { onProgress: (activity, progress) => setText(button, progress || activity) });
      location.reload();
    } catch (error) {
      button.disabled = false;
      setText(button, errorText(error));
    }
  });
  card.querySelector("[data-remove]")?.addEventListener("click", () => confirmThen({
    title: `Remove ${name}?`, detail: `${card.dataset.uploaded === undefined ? "The files in its folder stay." : "Its uploaded pictures are deleted."} No new job can use the dataset, and finished jobs can neither be evaluated nor retried.`, yes: "Remove it",
    act: async () => { await ask(`/api/v1/datasets/${encodeURIComponent(name)}`, { method: "DELETE" }); location.reload(); },
  }));
}
