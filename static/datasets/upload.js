// The form that uploads a zip file of pictures, in pieces, and registers it as a dataset.

import { activityIn, ask, byId, Problem, errorText } from "../page.js";
import { bytes } from "../numbers.js";
import { readUrl } from "../address.js";
import { nameOf, postUntilInspected, showFieldErrors } from "./form.js";

/** Size of a piece: the maximum that the server accepts. */
const PIECE_BYTES = 8 * 2 ** 20;
/** Maximum number of attempts to send a request. */
const MAX_TRIES = 6;

/** Sends a request again after a temporary failure. Offline, it waits for the connection without counting attempts. */
async function sendWithRetries(send, showActivity) {
  for (let tries = 1; ;) {
    try { return await send(); } catch (error) {
      const isTemporary = !(error instanceof Problem) || error.status === 429 || error.status >= 500;
      if (!isTemporary || tries === MAX_TRIES) throw error;
      showActivity(navigator.onLine ? "The server does not answer. Trying again …" : "No connection. Trying again …");
      if (navigator.onLine) tries++;
      await new Promise((done) => setTimeout(done, 1000 * tries));
    }
  }
}

/** Makes the browser ask before the page is left, because that would end the upload. */
const keepPage = (event) => event.preventDefault();

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
    if ((await file.slice(0, 2).text()) !== "PK") return showErrors([{ pointer: "/file", detail: `${file.name} is not a zip file. Pack a folder that has one folder of pictures for each class, such as cat/1.jpg and dog/1.jpg, into a zip file.` }]);
    const path = `/api/v1/datasets/uploads/${encodeURIComponent(name)}`;
    button.disabled = true;
    bar.hidden = false;
    addEventListener("beforeunload", keepPage);
    try {
      for (let offset = 0; offset === 0 || offset < file.size; offset += PIECE_BYTES) {
        bar.value = offset / Math.max(1, file.size);
        showActivity("Uploading …", `${bytes(offset)} of ${bytes(file.size)}`);
        const body = file.slice(offset, offset + PIECE_BYTES);
        await sendWithRetries(() => ask(`${path}/archive?offset=${offset}`, { method: "PUT", body }), showActivity);
      }
      bar.value = 1;
      showActivity("Unpacking the files …");
      await sendWithRetries(() => postUntilInspected(path, { body: {}, onProgress: showActivity }), showActivity);
    } catch (error) {
      button.disabled = false;
      bar.hidden = true;
      showActivity("");
      // 409: the name is taken. Only mistakes in the name are in `errors`.
      return showErrors([{ pointer: error.status === 409 || error.errors?.length ? "/name" : "/file", detail: errorText(error) }]);
    } finally {
      removeEventListener("beforeunload", keepPage);
    }
    // With `for=job` in the URL, the reader came from the form for a new job.
    if (readUrl("for") === "job") location.href = `/jobs/new?dataset=${encodeURIComponent(name)}`; else location.assign("/datasets");
  });
}
