// The form that uploads a zip file of pictures, in pieces, and registers it as a dataset.

import { activityIn, ask, byId, Problem, errorText } from "../page.js";
import { bytes } from "../numbers.js";
import { readUrl } from "../address.js";
import { nameOf, postUntilInspected, showFieldErrors } from "./form.js";

/** Size of a piece: the maximum that the server accepts. */
const PIECE_BYTES = 8 * 2 ** 20;
/** Maximum number of attempts to send a piece. */
const MAX_TRIES = 6;

async function sendPiece(path, piece) {
  for (let tries = 1; ; tries++) {
    try { return await ask(path, { method: "PUT", body: piece }); } catch (error) {
      const isTemporary = !(error instanceof Problem) || error.status === 429 || error.status >= 500;
      if (!isTemporary || tries === MAX_TRIES) throw error;
      await new Promise((done) => setTimeout(done, 1000 * tries));
    }
  }
}

export function offerUpload(form) {
  const bar = byId("u-progress"), button = form.querySelector("button");
  const showActivity = activityIn("u-status", "u-count");
  const showErrors = (errors) => showFieldErrors("u", ["name", "file"], errors);
  form.hidden = false;
  if (location.hash === "#upload") form.scrollIntoView();
  byId("u-file").addEventListener("change", () => {
    const [file] = byId("u-file").files;
    if (file && !byId("u-name").value.trim()) byId("u-name").value = nameOf(file.name.replace(/\.zip$/i, ""));
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const [file] = byId("u-file").files, name = byId("u-name").value.trim();
    showErrors([...(name ? [] : [{ pointer: "/name", detail: "Give the dataset a name." }]), ...(file ? [] : [{ pointer: "/file", detail: "Choose a zip file first." }])]);
    if (!file || !name) return;
    // Every zip file begins with these letters.
    if ((await file.slice(0, 2).text()) !== "PK") return showErrors([{ pointer: "/file", detail: `${file.name} is not a zip file.` }]);
    const path = `/api/v1/datasets/uploads/${encodeURIComponent(name)}`;
    button.disabled = true;
    bar.hidden = false;
    try {
      for (let offset = 0; offset === 0 || offset < file.size; offset += PIECE_BYTES) {
        bar.value = offset / Math.max(1, file.size);
        showActivity("Uploading …", `${bytes(offset)} of ${bytes(file.size)}`);
        await sendPiece(`${path}/archive?offset=${offset}`, file.slice(offset, offset + PIECE_BYTES));
      }
      bar.value = 1;
      showActivity("Unpacking the files …");
      await postUntilInspected(path, { body: {}, onProgress: showActivity });
      // With `for=job` in the URL, the reader came from the form for a new job.
      if (readUrl("for") === "job") location.href = `/jobs/new?dataset=${encodeURIComponent(name)}`; else location.assign("/datasets");
    } catch (error) {
      button.disabled = false;
      bar.hidden = true;
      showActivity("");
      // 409: the name is taken. Only mistakes in the name are in `errors`.
      showErrors([{ pointer: error.status === 409 || error.errors?.length ? "/name" : "/file", detail: errorText(error) }]);
    }
  });
}
