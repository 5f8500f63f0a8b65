// The form that registers a dataset. The folder is inspected 0.6 s after the last change of the path.

import { activityIn, ask, byId, Problem, errorText, setMessage } from "../page.js";
import { count, plural } from "../numbers.js";

const INSPECT_AFTER_MS = 600;
const FIELDS = ["name", "path"];

const showActivity = activityIn("add-status", "add-count");

/** Shows the errors of each field beside the field. `prefix`: the beginning of the ids of the form's elements. */
export function showFieldErrors(prefix, fields, errors) {
  for (const name of fields) {
    const node = byId(`${prefix}-${name}-error`);
    const message = errors.filter((e) => e.pointer === `/${name}`).map((e) => e.detail).join("; ");
    setMessage(node, message);
    node.closest(".field").classList.toggle("wrong", message !== "");
  }
}

function showErrors(errors) {
  showFieldErrors("d", FIELDS, errors);
  showActivity(errors.filter((e) => !FIELDS.includes(e.pointer.slice(1))).map((e) => e.detail).join(" "));
}

function showError(error) {
  showActivity("");
  if (error instanceof Problem && error.errors.length) showErrors(error.errors); else showActivity(errorText(error));
}

/** Makes a dataset's name from the path of its folder or file. */
export const nameOf = (path) => path.replace(/\/+$/, "").split("/").pop().replace(/[^\w.-]+/g, "-").replace(/^\.+/, "");

/** Describes the content of a folder in a sentence. */
function describeFolder({ info }) {
  const size = info.width ? `${info.width} × ${info.height}` : "of different sizes";
  const splits = info.splits.map((s) => plural(s.samples, `${s.name} picture`)).join(", ");
  const broken = info.broken_count ? `; ${plural(info.broken_count, "file")} cannot be used` : "";
  const leftOut = info.unlabelled?.length ? `; left out, as they have no labels: ${info.unlabelled.join(", ")}` : "";
  return `Found ${info.format.replace("_", " ")}: ${splits}, ${size}, ${plural(info.classes.length, "class")} (${info.classes.slice(0, 6).join(", ")}${info.classes.length > 6 ? " …" : ""})${broken}${leftOut}.`;
}

/**
 * Sends a request again until the server has inspected the files, which takes minutes for a million pictures. Returns the response.
 * `onProgress(activity, progress)`: called with both texts while the inspection runs.
 */
export async function postUntilInspected(path, { body, signal, onProgress }) {
  for (;;) {
    const response = await ask(`${path}?wait_secs=3`, { method: "POST", body, signal });
    if (response.info) return response;
    onProgress(response.detail?.startsWith("unpacking") ? "Unpacking the files …" : "Inspecting the files …", response.total ? `${count(response.inspected)} of ${count(response.total)}` : "");
  }
}

/** Sets up the form, which inspects the path after typing, and registers the dataset without leaving the page. */
export function setUpForm(form) {
  let timer = 0, inspection = null;
  form.path.addEventListener("input", () => {
    clearTimeout(timer);
    inspection?.abort();
    showErrors([]);
    const path = form.path.value.trim();
    if (path.startsWith("/") && path.length > 1) timer = setTimeout(() => inspect(path), INSPECT_AFTER_MS);
  });

  async function inspect(path) {
    const thisInspection = inspection = new AbortController();
    showActivity("Inspecting the files …");
    try {
      const response = await postUntilInspected("/api/v1/datasets/inspect", { body: { path }, signal: thisInspection.signal, onProgress: showActivity });
      showActivity(describeFolder(response));
      if (!form.name.value.trim()) form.name.value = nameOf(path);
    } catch (error) {
      if (!thisInspection.signal.aborted) showError(error);
    }
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearTimeout(timer);
    inspection?.abort();
    const button = form.querySelector("button");
    button.disabled = true;
    showErrors([]);
    showActivity("Inspecting the files …");
    try {
      await postUntilInspected("/api/v1/datasets", { body: { name: form.name.value.trim(), path: form.path.value.trim() }, onProgress: showActivity });
      location.reload();
    } catch (error) {
      button.disabled = false;
      showError(error);
    }
  });
}
