// Reads and writes values in the page's URL, which contains the whole view, so that a link shows the same view.

const now = () => new URL(location.href);

/** Returns the value of `key` in the URL, or `otherwise`. */
export const read = (key, otherwise = "") => now().searchParams.get(key) ?? otherwise;

/** Writes values into the URL without a new history entry. Empty values are removed. */
export function write(values) {
  const url = now();
  for (const [key, value] of Object.entries(values)) {
    if (value === "" || value === null || value === undefined || value === false) url.searchParams.delete(key);
    else url.searchParams.set(key, String(value));
  }
  if (url.href !== location.href) history.replaceState(history.state, "", url);
}
