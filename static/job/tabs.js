// The panels below the charts, one at a time. The page's URL names the open panel.

import { byId } from "../page.js";
import { readUrl, writeUrl } from "../address.js";

export class Tabs {
  /** `onOpen`: functions by the names of panels, called whenever the panel is opened. */
  constructor(onOpen) {
    this.onOpen = onOpen;
    this.tabs = [...document.querySelectorAll("#panels [role=tab]")];
    for (const tab of this.tabs) {
      tab.addEventListener("click", () => this.show(tab.dataset.tab));
      tab.addEventListener("keydown", (event) => {
        const visible = this.tabs.filter((t) => !t.hidden), at = visible.indexOf(tab), index = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: -1 }[event.key];
        if (index === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        const target = visible.at(index % visible.length);
        this.show(target.dataset.tab);
        target.focus();
      });
    }
    // A run from elsewhere has no log.
    this.first = this.tabs.find((t) => !t.hidden).dataset.tab;
    const wanted = readUrl("tab", this.first), linked = this.tabs.some((t) => t.dataset.tab === wanted && !t.hidden);
    this.show(linked ? wanted : this.first);
    // On a reload, the browser restores the reader's scroll position.
    if (linked && wanted !== this.first && performance.getEntriesByType("navigation")[0]?.type !== "reload") requestAnimationFrame(() => this.scrollIntoView());
  }

  /** Scrolls the panel into view. */
  scrollIntoView() {
    const panels = byId("panels"), { top } = panels.getBoundingClientRect();
    if (top < 0 || top > innerHeight / 2) panels.scrollIntoView({ block: "start" });
  }

  /** Shows the tab of a panel that not every job has. */
  reveal(name) { for (const tab of this.tabs) if (tab.dataset.tab === name) tab.hidden = false; }

  isOpen(name) { return byId("panels").dataset.shows === name; }

  show(name) {
    for (const tab of this.tabs) {
      const isOpen = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", String(isOpen));
      tab.tabIndex = isOpen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !isOpen;
    }
    byId("log-controls").hidden = name !== "log";
    byId("panels").dataset.shows = name;
    writeUrl({ tab: name === this.first ? "" : name });
    this.onOpen[name]?.();
  }
}
