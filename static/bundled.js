// A new server offers the program's bundled pictures: one click registers them.

import { ask, Problem, sentence, text } from "./page.js";

export function offerBundled() {
  for (const button of document.querySelectorAll("[data-bundled]")) button.addEventListener("click", async () => {
    const label = button.textContent;
    button.disabled = true;
    text(button, "Unpacking …");
    try {
      // The status is 202 while the pictures are inspected for the first time.
      while (!(await ask("/api/v1/datasets/bundled", { method: "POST" })).name) text(button, "Inspecting …");
      location.href = button.dataset.bundled;
    } catch (error) {
      // Somebody else has just registered them.
      if (error instanceof Problem && error.status === 409) { location.href = button.dataset.bundled; return; }
      button.disabled = false;
      text(button, label);
      const said = button.parentElement.querySelector(".error") ?? button.parentElement.appendChild(Object.assign(document.createElement("span"), { className: "error" }));
      said.setAttribute("role", "alert");
      text(said, ` ${sentence(error)}`);
    }
  });
}
