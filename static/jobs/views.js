// Named views of the list. A view is a URL: filters, order and columns. The browser stores the names. To share a view, send its URL.

import { make, makeButton, parseList, store, readStored, setText } from "../page.js";
import { field, menu } from "./filter-menu.js";

const STORAGE_KEY = "views", MAX_VIEWS = 50;
/** Maximum lengths of a view's name and URL, in characters. */
const MAX_NAME = 60, MAX_QUERY = 4000;

const loadViews = () => parseList(readStored(STORAGE_KEY)).filter((view) => typeof view?.name === "string" && typeof view.query === "string").slice(0, MAX_VIEWS);

export class Views {
  /** `columns()`: returns the visible columns, as in the URL. */
  constructor(columns) {
    this.columns = columns;
    this.list = make("ul", { className: "views" });
    this.input = make("input", { id: "view-name", maxLength: MAX_NAME, autocomplete: "off", placeholder: "Name of this view" });
    this.error = make("p", { className: "error", role: "alert" });
    const form = make("form", {}, field("Save what is shown now", this.input), make("button", { textContent: "Save" }));
    form.addEventListener("submit", (event) => { event.preventDefault(); this.#save(this.input.value.trim().slice(0, MAX_NAME)); });
    this.menu = menu("Views", "saved-views", this.list, form, this.error);
    this.menu.addEventListener("toggle", () => { if (this.menu.open) this.#draw(); });
  }

  /** Returns the current URL, always with the columns, so that the view does not depend on the reader's own choice of columns. */
  #query() {
    const at = new URL(location.href).searchParams;
    at.delete("cursor");
    at.set("columns", this.columns());
    return at.toString();
  }

  /** Stores the views. Returns whether the browser allows this. */
  #store(views) {
    const isStored = store(STORAGE_KEY, JSON.stringify(views));
    setText(this.error, isStored ? "" : "This browser stores no data: bookmark this page instead.");
    return isStored;
  }

  #save(name) {
    const views = loadViews(), query = this.#query(), others = views.filter((view) => view.name !== name);
    if (!name) return setText(this.error, "Write a name.");
    if (others.length >= MAX_VIEWS) return setText(this.error, `At most ${MAX_VIEWS} views can be stored: remove a view first.`);
    if (query.length > MAX_QUERY) return setText(this.error, "The view is too long to be stored: remove filters or columns.");
    if (!this.#store([...others, { name, query }].sort((a, b) => a.name.localeCompare(b.name)))) return;
    this.input.value = "";
    this.#draw();
  }

  #draw() {
    const views = loadViews();
    this.list.hidden = !views.length;
    this.list.replaceChildren(...views.map(({ name, query }) => {
      const remove = makeButton("×", () => { this.#store(loadViews().filter((view) => view.name !== name)); this.#draw(); this.input.focus(); }, { title: "Remove", "aria-label": `Remove the view ${name}` });
      return make("li", {}, make("a", { href: `/jobs?${query}`, textContent: name }), remove);
    }));
  }
}
