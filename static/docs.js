// The search of the documentation: shows results while the reader types.

import { byId, fetchPage, setText } from "./page.js";

const field = byId("docs-search"), article = document.querySelector(".docs article");
const firstArticle = [...article.childNodes], firstAddress = location.href;
let typing = 0;

field.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, 200); });

async function search() {
  if (!field.value) {
    article.replaceChildren(...firstArticle);
    history.replaceState(null, "", firstAddress);
    return;
  }
  const query = field.value, url = `/docs?q=${encodeURIComponent(query)}`, page = await fetchPage(url).catch(() => null);
  if (!page || query !== field.value) return;
  article.replaceChildren(...page.querySelector(".docs article").childNodes);
  // After Back, the reader finds the results again.
  history.replaceState(null, "", url);
  setText(byId("live-status"), article.querySelector("p").textContent);
}
