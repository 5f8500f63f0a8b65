// Every start of the job's ranks, and why it ended: they are kept however many follow.

import { ask, byId, text } from "../page.js";

export class Attempts {
  #asked = 0;

  constructor(job) { this.job = job; }

  /** After a change of the job's state. */
  async load() {
    const mine = ++this.#asked;
    const { attempts } = await ask(`/api/v1/jobs/${this.job}/attempts`);
    if (mine !== this.#asked) return;
    byId("attempts").hidden = !attempts.length;
    byId("attempt-rows").replaceChildren(...attempts.map(row));
  }
}

function row({ attempt, state, reason, checkpoint }) {
  const line = document.createElement("li"), what = document.createElement("b");
  line.value = line.dataset.attempt = attempt;
  line.dataset.code = reason?.code ?? "";
  text(what, state);
  line.append(what, reason ? `: ${reason.words}` : "");
  if (checkpoint) line.append(" ", Object.assign(document.createElement("span"), { className: "muted", textContent: `from ${checkpoint}` }));
  return line;
}
