// Reads and writes values in the page's URL, which contains the whole view, so that a link shows the same view.

import { markPressed } from "./page.js";

const currentUrl = () => new URL(location.href);

/** Returns the value of `key` in the URL, or `otherwise`. */
export const readUrl = (key, otherwise = "") => currentUrl().searchParams.get(key) ?? otherwise;

/** Writes values into the URL without a new history entry. Empty values are removed. */
export function writeUrl(values) {
  const url = currentUrl();
  for (const [key, value] of Object.entries(values)) {
    if (value === "" || value === null || value === undefined || value === false) url.searchParams.delete(key);
    else url.searchParams.set(key, String(value));
  }
  if (url.href !== location.href) history.replaceState(history.state, "", url);
}

/**
 * Sets up the buttons with `data-KEY`, one of which is pressed. The choice is in the URL, unless it is `initial`. Calls `apply(value)` at once
 * and after each click.
 */
export function setUpChoices(key, initial, apply) {
  const buttons = [...document.querySelectorAll(`button[data-${key}]`)], find = (value) => buttons.find((button) => button.dataset[key] === value);
  const choose = (button) => { markPressed(buttons, button); apply(button.dataset[key]); };
  for (const button of buttons) button.addEventListener("click", () => { choose(button); writeUrl({ [key]: button.dataset[key] === initial ? "" : button.dataset[key] }); });
  const chosen = find(readUrl(key, initial)) ?? find(initial);
  if (chosen) choose(chosen);
}
