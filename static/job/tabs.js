// The panels below the charts, one at a time; which one stands in the address.

import { byId } from "../page.js";
import { read, write } from "../address.js";

export class Tabs {
  #opened = new Set();

  /** `opened`: by panel's name, what is to be done when it is first opened. */
  constructor(opened) {
    this.opened = opened;
    this.tabs = [...document.querySelectorAll("#panels [role=tab]")];
    for (const tab of this.tabs) {
      tab.addEventListener("click", () => this.show(tab.dataset.tab));
      tab.addEventListener("keydown", (event) => {
        const hop = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!hop) return;
        const there = this.tabs.filter((t) => !t.hidden), next = there.at((there.indexOf(tab) + hop) % there.length);
        this.show(next.dataset.tab);
        next.focus();
      });
    }
    const wanted = read("tab", "log");
    this.show(this.tabs.some((t) => t.dataset.tab === wanted && !t.hidden) ? wanted : "log");
  }

  /** A panel that not every job has is there from now on. */
  reveal(name) { for (const tab of this.tabs) if (tab.dataset.tab === name) tab.hidden = false; }

  /** Whether a panel has been opened. */
  isOpened(name) { return this.#opened.has(name); }

  show(name) {
    for (const tab of this.tabs) {
      const on = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", String(on));
      tab.tabIndex = on ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !on;
    }
    byId("log-controls").hidden = name !== "log";
    write({ tab: name === "log" ? "" : name });
    if (this.#opened.has(name)) return;
    this.#opened.add(name);
    this.opened[name]?.();
  }
}
