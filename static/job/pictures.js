// Small pictures with a model's predictions.

import { ask } from "../page.js";
import { percent } from "../numbers.js";

/** Returns a picture's image element. Small pictures are enlarged without smoothing. */
export function image(png, alt) {
  const img = document.createElement("img");
  img.src = `data:image/png;base64,${png}`;
  img.alt = alt;
  img.loading = "lazy";
  img.className = "picture";
  return img;
}

/** Returns a figure with a caption. */
export function figure(png, alt, lines) {
  const figure = document.createElement("figure"), caption = document.createElement("figcaption");
  for (const [words, className] of lines) caption.append(Object.assign(document.createElement("span"), { textContent: words, className: className ?? "" }));
  figure.append(image(png, alt), caption);
  return figure;
}

/** Returns a figure for each entry of an evaluation (mistakes or right predictions), in order. */
export async function predicted(job, entries, names) {
  const { samples } = await ask(`/api/v1/jobs/${job}/samples?indices=${entries.map((e) => e.index).join(",")}`);
  return samples.map((sample, i) => {
    const { label, predicted, confidence, index } = entries[i];
    const wrong = label !== predicted;
    const sure = percent(confidence, 0).replace(" ", "\u00a0");
    const alt = wrong ? `picture ${index}: ${names[label]}, taken for ${names[predicted]}` : `picture ${index}: ${names[label]}`;
    return figure(sample.png, alt, [[wrong ? `${names[predicted]} ${sure}` : `${sure} sure`, wrong ? "bad" : ""], [wrong ? `is ${names[label]}` : names[label], "muted"]]);
  });
}
