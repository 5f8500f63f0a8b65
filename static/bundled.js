// On a new server, registers the program's bundled pictures with one click.

import { ask, make, Problem, errorText, setText } from "./page.js";

export function offerBundled() {
  for (const button of document.querySelectorAll("[data-bundled]")) button.addEventListener("click", async () => {
    const label = button.textContent;
    button.disabled = true;
    setText(button, "Unpacking …");
    try {
      // The status is 202 while the pictures are inspected for the first time.
      while (!(await ask("/api/v1/datasets/bundled", { method: "POST" })).name) setText(button, "Inspecting …");
      location.href = button.dataset.bundled;
    } catch (error) {
      // Another user has just registered the pictures.
      if (error instanceof Problem && error.status === 409) { location.href = button.dataset.bundled; return; }
      button.disabled = false;
      setText(button, label);
      const output = button.parentElement.querySelector(".error") ?? button.parentElement.appendChild(make("span", { className: "error", role: "alert" }));
      setText(output, ` ${errorText(error)}`);
    }
  });
}
