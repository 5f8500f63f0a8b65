// The page's address holds the whole view: what is chosen is written there, and a link shows the same.

const now = () => new URL(location.href);

/** A value of the address, or `otherwise`. */
export const read = (key, otherwise = "") => now().searchParams.get(key) ?? otherwise;

/** Writes values into the address without another entry in the history; empty ones are left out. */
export function write(values) {
  const url = now();
  for (const [key, value] of Object.entries(values)) {
    if (value === "" || value === null || value === undefined || value === false) url.searchParams.delete(key);
    else url.searchParams.set(key, String(value));
  }
  if (url.href !== location.href) history.replaceState(history.state, "", url);
}
